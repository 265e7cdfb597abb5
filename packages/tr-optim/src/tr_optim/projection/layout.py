"""Say which tensors of a projected parameter's state are divided over ranks as its rows are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tr_optim.engine.shards import Shards
from tr_optim.projection.basis import sides

_NOT_OF_ROWS = ("basis_right", "basis_right_scales", "exp_avg_sq_col")
_IN_NO_LAYOUT = ("refreshed", "overlaps")  # of tr_optim.projection.refresh.LazyRefresh


def is_divided(name: str, shards: Shards, group: Mapping[str, Any]) -> bool | None:
    """Whether a tensor of a parameter's state has the parameter's rows; others are the same on all ranks.

    None for tensors without a layout, which are read on the host to decide whether a basis is due.

    Left columns have the rows of a matrix. So have the moments of a projection that is not from the left, except for
    means over its rows.

    Args:
        name: of the tensor.
        shards: how the parameter's rows are divided.
        group: the parameter's group, with the options of its projection; without `projects` it has none.
    """
    if name in _IN_NO_LAYOUT:
        return None
    if not shards.divides_matrix:
        return True
    is_from_left = group.get("projects", False) and sides(shards.shape, group["proj_type"])[0]
    return name == "basis_left" or (name not in _NOT_OF_ROWS and not is_from_left)
