"""Refuse, in words, what is not built for parameters of which each rank holds some rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from tr_optim.engine.settings import Engine, RowRule, Rule
from tr_optim.engine.shards import sharded_parameters
from tr_optim.projection.basis import sides

_REPLICAS = "train with replicas (strategy='ddp')"


def check_shards(groups: Sequence[Mapping[str, Any]], owner: str, engine: Engine, rule: Rule) -> None:
    """Raise where groups, projected or not, have parameters in shards, and their optimizer cannot update parts.

    Raises:
        ValueError: the message says what to change.
    """
    takes = rule.is_elementwise or isinstance(rule, RowRule)
    instead = f"and what its rule needs of whole ones is not built over parts; {_REPLICAS}, or use GaLoreAdamW"
    parameters = chain.from_iterable(group["params"] for group in groups)
    sharded = sharded_parameters(parameters, owner, takes=takes, instead=instead)
    if not sharded or engine.basis_dtype in ("float32", "bfloat16"):
        return
    projected = ((parameter, group) for group in groups if group["projects"] for parameter in group["params"])
    for parameter, group in projected:
        shape = parameter.shape
        if id(parameter) in sharded and (len(shape) > 2 or sides(shape, group["proj_type"])[0]):
            raise ValueError(
                f"{owner}: the rows of a parameter of shape {tuple(shape)} are divided over ranks, and with them its "
                f"basis, of whose codes with basis_dtype={engine.basis_dtype!r} one block would lie on several; use "
                "proj_type='right', whose basis is of columns (not for stacks of matrices), basis_dtype='float32' or "
                f"'bfloat16', or {_REPLICAS}"
            )
