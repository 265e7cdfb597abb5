"""Say where the numbers of each parameter are in the flat tensors that ZeRO divides over the ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn


@dataclass(frozen=True)
class Piece:
    """The part of one parameter that this rank has.

    Attributes:
        flat: the tensor that this rank's optimizer changes, of which the piece is a part.
        group: number of the optimizer's group.
        start: where in `flat` the piece begins.
        offset: where in the flattened parameter the piece begins.
        size: how many numbers; 0 if this rank has none of the parameter.
        subgroup: number of `flat` among those that ZeRO-3 can swap out; None at other stages.
    """

    flat: torch.Tensor
    group: int
    start: int = 0
    offset: int = 0
    size: int = 0
    subgroup: int | None = None

    def of(self, values: torch.Tensor) -> torch.Tensor:
        """Return the piece of a tensor that is laid out as `flat`."""
        return values.narrow(0, self.start, self.size)

    def gather(self, values: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """Put the parameter's numbers together from all ranks' tensors that are laid out as `flat`. Collective."""
        whole = torch.zeros(shape.numel(), dtype=values.dtype, device=values.device)
        if self.size:
            whole.narrow(0, self.offset, self.size).copy_(self.of(values))
        dist.all_reduce(whole)
        return whole.view(shape)

    def fill(self, values: torch.Tensor, whole: torch.Tensor) -> None:
        """Copy this rank's piece of a whole tensor into one that is laid out as `flat`."""
        if self.size:
            self.of(values).copy_(whole.reshape(-1).narrow(0, self.offset, self.size))


def pieces_of(zero: Any, groups: list[list[nn.Parameter]], stage: int, rank: int) -> list[Piece]:
    """Return this rank's piece of every parameter of an optimizer's groups, in their order.

    Args:
        zero: DeepSpeed's optimizer of stage 1, 2 or 3.
        groups: the parameters of each group.
        stage: of ZeRO.
        rank: of this process.
    """
    if stage == 3:
        return [_of_stage_3(zero, p, rank) for parameters in groups for p in parameters]
    flats = zero.single_partition_of_fp32_groups
    return [_of_stage_2(flats[group], group, p) for group, parameters in enumerate(groups) for p in parameters]


def _of_stage_2(flat: torch.Tensor, group: int, parameter: Any) -> Piece:
    mapping = parameter._hp_mapping
    if mapping is None:
        return Piece(flat, group)
    inside, here = mapping.lp_fragment_address, mapping.hp_fragment_address
    return Piece(flat, group, here.start, inside.start, inside.numel)


def _of_stage_3(zero: Any, parameter: Any, rank: int) -> Piece:
    subgroup, start, size = zero.grad_position[zero.get_param_id(parameter)]
    flat, group = zero.fp32_partitioned_groups_flat[subgroup], zero.sub_group_to_group_id[subgroup]
    offset = rank * size  # the last ranks' pieces are filled up to this size
    return Piece(flat, group, start, offset, max(0, min(size, parameter.ds_numel - offset)), subgroup)
