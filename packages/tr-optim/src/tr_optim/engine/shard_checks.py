"""Refuse, in words, what is not built for parameters of which each rank holds some rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any

from tr_optim.engine.bases import Bases
from tr_optim.engine.returning import Returning
from tr_optim.engine.settings import Engine, RowRule, Rule
from tr_optim.engine.shards import sharded_parameters

_REPLICAS = "train with replicas (strategy='ddp')"


def check_shards(
    groups: Iterable[Mapping[str, Any]], owner: str, engine: Engine, rule: Rule, bases: Bases, returning: Returning
) -> None:
    """Raise where groups, projected or not, have parameters in shards, and their optimizer cannot update parts.

    Raises:
        ValueError: the message says what to change.
    """
    reason = _reason(engine, rule, bases, returning)
    parameters = chain.from_iterable(group["params"] for group in groups)
    sharded_parameters(parameters, owner, takes=reason is None, instead=reason or "")


def _reason(engine: Engine, rule: Rule, bases: Bases, returning: Returning) -> str | None:
    is_built = rule.is_elementwise or isinstance(rule, RowRule)
    if not is_built or returning.needs_whole or type(bases) is not Bases:
        return f"and what it needs of whole ones is not built over parts; {_REPLICAS}, or use GaLoreAdamW or AdaLomo"
    if engine.refresh != "fixed" or engine.basis_dtype not in ("float32", "bfloat16"):
        return (
            f"and refresh={engine.refresh!r} with basis_dtype={engine.basis_dtype!r} is not built over parts, which "
            "would have other cosines and blocks of codes than whole ones; use 'fixed' with 'float32' or 'bfloat16', "
            f"or {_REPLICAS}"
        )
    return None
