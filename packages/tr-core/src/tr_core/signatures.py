"""Ask what a function takes, and whether a method is the one that a base class defines."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any


def parameters_of(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a function by name; those of a method without `self`."""
    return inspect.signature(function).parameters


def takes_argument(function: Callable[..., Any], name: str) -> bool:
    """Whether a function can be called with the keyword argument `name`."""
    parameters = parameters_of(function)
    return name in parameters or any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())


def names_argument(function: Callable[..., Any], name: str) -> bool:
    """Whether a function has a parameter `name`, rather than take it among others by `**kwargs`."""
    return name in parameters_of(function)


def is_overridden(obj: object, name: str, base: type) -> bool:
    """Whether a method of an object is another one than that of a class.

    It is where a subclass defines it, and where a function was assigned to the object.

    Args:
        obj: the object; it need not be of the class.
        name: the method's name.
        base: the class whose method is the usual one.
    """
    method = getattr(obj, name)
    return getattr(method, "__func__", method) is not getattr(base, name)


def with_count(step: Callable[..., Any]) -> Callable[..., Any]:
    """Return `training_step` as the loop calls it, with the count as the third argument, whatever an override takes."""
    parameters = list(parameters_of(step).values())
    by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    if sum(p.kind in by_position for p in parameters) > 2 or any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return step
    if takes_argument(step, "num_items_in_batch"):
        return lambda model, inputs, num_items: step(model, inputs, num_items_in_batch=num_items)
    return lambda model, inputs, num_items: step(model, inputs)
