"""Carry whole tensors as rows that are divided over the ranks, for a checkpoint that every rank writes a part of."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard


class Rows:
    """Divide tensors over the ranks by their first dimension, in host memory.

    What a checkpoint so holds is laid out as parameters of `fully_shard` are: no number of ranks, and no stage, is
    written into it.
    """

    def __init__(self) -> None:
        self._mesh = DeviceMesh("cpu", list(range(dist.get_world_size())))

    def keep(self, whole: torch.Tensor) -> torch.Tensor:
        """Return a tensor of which this rank keeps its rows alone; one number is kept as it is, by all."""
        if whole.dim() == 0:
            return whole.detach().cpu()
        mine = self._rows(len(whole))
        local = whole.detach()[mine].cpu().clone()
        return self._divided(local, whole.shape)

    def whole(self, value: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Return all rows of what `keep` returned, or a plain tensor, on `device`. Collective."""
        if isinstance(value, DTensor):
            value = value.full_tensor()
        return value.to(device)

    def __bool__(self) -> bool:
        """True: a checkpoint that holds whole tensors is to be read in rows too."""
        return True

    def empty(self, name: str, saved: Any) -> torch.Tensor:
        """Return memory for a tensor of a checkpoint that is being read: of `saved.shape` and `saved.dtype`."""
        shape = torch.Size(saved.shape)
        if not shape:
            return torch.empty(shape, dtype=saved.dtype)
        mine = self._rows(shape[0])
        return self._divided(torch.empty((mine.stop - mine.start, *shape[1:]), dtype=saved.dtype), shape)

    def _rows(self, number: int) -> slice:
        size = -(-number // self._mesh.size())
        start = min(number, self._mesh.get_local_rank() * size)
        return slice(start, min(number, start + size))

    def _divided(self, local: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(local, self._mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)
