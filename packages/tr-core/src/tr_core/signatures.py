"""Inspect the parameters of a function, and whether a method overrides that of a base class."""

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
    """Whether a function has its own parameter `name`, not only `**kwargs`."""
    return name in parameters_of(function)


def is_overridden(obj: object, name: str, base: type) -> bool:
    """Whether an object's method differs from that of a class.

    It differs if a subclass defines it, or if a function was assigned to the object.
    """
    method = getattr(obj, name)
    return getattr(method, "__func__", method) is not getattr(base, name)


def with_count(step: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `training_step` so that the loop can pass the count as third argument, whatever an override takes."""
    parameters = list(parameters_of(step).values())
    by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    if sum(p.kind in by_position for p in parameters) > 2 or any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return step
    if takes_argument(step, "num_items_in_batch"):
        return lambda model, inputs, num_items: step(model, inputs, num_items_in_batch=num_items)
    return lambda model, inputs, num_items: step(model, inputs)


def one_of_two_names(name: str, value: Any, other_name: str, other: Any) -> Any:
    """Return the value that was passed under either of two names of one argument.

    Raises:
        ValueError: both were passed, and differ.
    """
    if value is not None and other is not None and value is not other:
        raise ValueError(f"{name} and {other_name} are two names for one thing and were given different values")
    return value if value is not None else other
