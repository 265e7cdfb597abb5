"""Decide which rank writes which chunk of a part, with the planner of torch.distributed.checkpoint.

Each rank says what it holds (`Share`); the shares are exchanged, and from the same shares every rank finds the same
plan. A chunk that several ranks hold is written by one of them, the one with least to write so far. Tensors that are
no DTensors are written by rank 0, as those of a part without DTensors are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tr_ckpt import distributed_tensor
from tr_ckpt.distributed_tensor import is_distributed
from tr_ckpt.errors import CheckpointError
from tr_ckpt.sharded import shard_index
from tr_ckpt.sharded.shard_index import Chunk, Index, SavedTensor

# Dtype and global shape of a tensor, and whether it is a DTensor.
Entry = tuple[torch.dtype, tuple[int, ...], bool]


@dataclass(frozen=True)
class Share:
    """What one rank holds of a part. Made to be sent to the others.

    Attributes:
        tensors: the entry of every tensor in the state, by name.
        plan: torch's, of this rank's chunks.
    """

    tensors: dict[str, Entry]
    plan: Any

    @property
    def held(self) -> set[str]:
        """Names of the tensors of which this rank holds anything."""
        return {item.index.fqn for item in self.plan.items}

    def distributed(self) -> dict[str, Entry]:
        """Return the entries of the DTensors; what is none is rank 0's, whatever the others hold."""
        return {name: entry for name, entry in self.tensors.items() if entry[2]}


@dataclass(frozen=True)
class Assignment:
    """What one rank has to write.

    Attributes:
        local: this rank's chunks by the names of their tensors: the state's own memory.
        index: where each chunk of each tensor will be, over all ranks.
    """

    local: dict[str, torch.Tensor]
    index: Index


def share(part: str, tensors: Mapping[str, torch.Tensor], rank: int) -> Share | None:
    """Return what this rank holds of a part's tensors; None if none is a DTensor. Communicates nothing.

    Raises:
        CheckpointError: a DTensor's layout cannot be saved.
    """
    if not any(is_distributed(tensor) for tensor in tensors.values()):
        return None
    from torch.distributed.checkpoint.planner import SavePlan

    planner = _planner(tensors, rank)
    plan = planner.create_local_plan()
    items = []
    for item in plan.items:
        size = tuple(item.tensor_data.chunk.sizes)
        local = planner.resolve_data(item)
        if size != tuple(local.shape):
            raise CheckpointError(
                f"{part}: the shard of {item.index.fqn!r} has the shape {list(local.shape)} where its placements say "
                f"{list(size)}; give shape= and stride= to DTensor.from_local when shards are uneven"
            )
        if math.prod(size):  # ranks beyond the last row hold nothing
            items.append(item)
    described = {
        name: (tensor.dtype, tuple(tensor.shape), is_distributed(tensor)) for name, tensor in sorted(tensors.items())
    }
    return Share(described, SavePlan(items))


def assign(part: str, tensors: Mapping[str, torch.Tensor], rank: int, shares: Sequence[Share | None]) -> Assignment:
    """Return what this rank writes, given the shares of all ranks in rank order.

    Raises:
        CheckpointError: the ranks do not hold the same tensors, or their chunks do not make up whole ones.
    """
    entries = agreed(part, shares)
    planner = _planner(tensors, rank)
    try:
        plans, _ = planner.create_global_plan([given.plan for given in shares if given is not None])
    except ValueError as error:
        raise CheckpointError(
            f"{part}: the shards of the ranks do not make up whole tensors, each number once: {error}"
        ) from error
    chunks: dict[str, list[Chunk]] = {name: [] for name in entries}
    for writer, plan in enumerate(plans):
        for item in plan.items:
            chunk = item.tensor_data.chunk
            chunks[item.index.fqn].append(
                Chunk(shard_index.shard_name(part, writer), tuple(chunk.offsets), tuple(chunk.sizes))
            )
    index = {
        name: SavedTensor(dtype, shape, distributed, tuple(chunks[name]))
        for name, (dtype, shape, distributed) in entries.items()
    }
    return Assignment({item.index.fqn: planner.resolve_data(item) for item in plans[rank].items}, index)


def _planner(tensors: Mapping[str, torch.Tensor], rank: int) -> Any:
    distributed_tensor.require()
    from torch.distributed.checkpoint import DefaultSavePlanner

    mine = {name: tensor for name, tensor in tensors.items() if rank == 0 or is_distributed(tensor)}
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(mine, is_coordinator=rank == 0)
    return planner


def agreed(part: str, shares: Sequence[Share | None]) -> dict[str, Entry]:
    """Return the entries of a part's tensors, on which all ranks agree.

    Raises:
        CheckpointError: they do not.
    """
    first = shares[0]
    for rank, other in enumerate(shares):
        if first is None or other is None:
            without = [str(number) for number, given in enumerate(shares) if given is None]
            raise CheckpointError(
                f"{part} holds DTensors, but none on rank {', '.join(without)}; all ranks must hold the same state"
            )
        ours, theirs = first.distributed(), other.distributed()
        # Where a rank's shard is empty nothing says that two names are of one tensor, as for tied weights.
        theirs = {name: entry for name, entry in theirs.items() if name in ours or name in other.held}
        if ours != theirs:
            name = next(name for name in sorted({*ours, *theirs}) if ours.get(name) != theirs.get(name))
            raise CheckpointError(
                f"{part}: {name!r} is {_describe(ours.get(name))} on rank 0 and {_describe(theirs.get(name))} on rank "
                f"{rank}; all ranks must hold the same DTensors (stages of a pipeline are not supported)"
            )
    assert first is not None
    return first.tensors


def _describe(entry: Entry | None) -> str:
    return "absent" if entry is None else f"{list(entry[1])} of {entry[0]}"
