"""Find out which labels of a batch are targets of the model, and whether it takes their number."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any

from torch import nn

IGNORED_TARGET = -100
_CROSS_ENTROPIES = frozenset({"CrossEntropyLoss", "cross_entropy", "nll_loss"})


def accepts_count(model: nn.Module) -> bool:
    """Whether a model's forward may be given `num_items_in_batch`.

    A class that says `accepts_loss_kwargs` is believed. Else the parameter must be named, or be taken by `**kwargs` of
    a model that has a `loss_function` to pass it to: any other `**kwargs` may refuse or ignore it.
    """
    declared = getattr(model, "accepts_loss_kwargs", None)
    if declared is not None:
        return bool(declared)
    parameters = inspect.signature(model.forward).parameters
    if "num_items_in_batch" in parameters:
        return True
    has_kwargs = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    return has_kwargs and "loss_function" in dir(type(model))


def shifts_targets(model: nn.Module) -> bool:
    """Whether a model predicts the next position itself, so that the first label of a row is no target.

    It is read off the model's class and not off `loss_type`, which many a causal model of transformers never has, and
    which others have whose own loss shifts nothing. What the code of `forward` calls decides: where that is
    `loss_function`, it is this function; where it is a cross entropy of its own, its variables say whether it shifts.
    """
    if "loss_function" not in dir(type(model)):
        return False
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return False
    codes = list(_codes_of_forward(model))
    called = {name for code in codes for name in code.co_names}
    if "loss_function" not in called and called & _CROSS_ENTROPIES:
        return any("shift" in name for code in codes for name in code.co_varnames)
    if "loss_function" not in called and getattr(model, "loss_type", None) is None:
        return False
    return getattr(getattr(model, "loss_function", None), "__name__", "") == "ForCausalLMLoss"


def averages_over_targets(model: nn.Module) -> bool:
    """Whether a model of transformers computes a plain cross entropy by itself, without the count: a mean over targets.

    Such are BART, T5 and the taggers of BERT's kin. A cross entropy that is not reduced at once may become any mean.
    """
    codes = list(_codes_of_forward(model)) if "loss_function" in dir(type(model)) else []
    called = {name for code in codes for name in code.co_names}
    reduces_later = any("none" in code.co_consts or ("none",) in code.co_consts for code in codes)
    return "loss_function" not in called and bool(called & _CROSS_ENTROPIES) and not reduces_later


def takes_argument(function: Callable[..., Any], name: str) -> bool:
    """Whether a function can be called with the keyword argument `name`."""
    parameters = inspect.signature(function).parameters
    return name in parameters or any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())


def _codes_of_forward(model: nn.Module) -> Iterator[CodeType]:
    """Yield the code of `forward`, and of those of parent classes for as long as one calls the next."""
    own = [model.forward] if "forward" in vars(model) else []
    for forward in [*own, *(vars(kind)["forward"] for kind in type(model).__mro__ if "forward" in vars(kind))]:
        code = _code_of(forward)
        if code is None:
            return
        yield code
        for name in code.co_names:  # a method of the model's own that computes the loss
            helper = getattr(type(model), name, None) if "loss" in name and name != "loss_function" else None
            helper_code = _code_of(helper) if callable(helper) else None
            if helper_code is not None:
                yield helper_code
        if "super" not in code.co_names and forward not in own:
            return


def _code_of(function: Any) -> CodeType | None:
    unwrapped = inspect.unwrap(function)
    return getattr(getattr(unwrapped, "__func__", unwrapped), "__code__", None)
