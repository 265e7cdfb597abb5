"""Parameters of which each rank holds a part, as FSDP2 makes them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor that is divided over ranks, and any other as it is."""
    to_local: Any = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()


def sharded_parameters(parameters: Iterable[torch.Tensor], world_size: int, optimizer: Any) -> set[int]:
    """Return the ids of the parameters that are divided over all ranks by their rows.

    Args:
        parameters: those to look at.
        world_size: number of ranks.
        optimizer: whose they are; its `takes_shards` says whether it can update parts.

    Raises:
        ValueError: one is divided, and the optimizer cannot update parts, or in another way.
    """
    found = set()
    for parameter in parameters:
        if not hasattr(parameter, "device_mesh"):
            continue
        owner, tensor = type(optimizer).__name__, f"a parameter of shape {tuple(parameter.shape)}"
        if not optimizer.takes_shards:
            raise ValueError(
                f"{owner}: {tensor} is a DTensor, of which each rank holds a part, and statistics of whole rows and "
                f"columns over parts are not built; train with replicas (strategy='ddp'), or with {optimizer.ordinary}"
            )
        mesh, placements = parameter.device_mesh, parameter.placements  # type: ignore[attr-defined]
        if mesh.ndim != 1 or mesh.size() != world_size or not placements[0].is_shard(0):
            raise ValueError(
                f"{owner}: {tensor} is a DTensor with {placements} over {tuple(mesh.shape)} of {world_size} ranks; "
                "what is built is rows divided over all ranks, as fully_shard(module) does on a mesh of one dimension"
            )
        found.add(id(parameter))
    return found
