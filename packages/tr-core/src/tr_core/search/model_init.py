"""Find out whether a function that makes models wants to know the trial."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any


def takes_trial(model_init: Callable[..., Any]) -> bool:
    """Whether `model_init` takes the trial: as its only required argument, or one called `trial`, or one that is None.

    Arguments with other defaults are left alone: a class with options of its own is a `model_init` too.

    Raises:
        ValueError: it needs more than one argument, or one by name.
    """
    try:
        parameters = list(inspect.signature(model_init).parameters.values())
    except (TypeError, ValueError):  # a callable that does not tell
        return False
    named = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    required = [p for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if len(required) > 1 or any(p.kind is p.KEYWORD_ONLY for p in required):
        names = ", ".join(p.name for p in required)
        raise ValueError(
            f"model_init needs the arguments {names}; it may need none, or one, which is the trial of a search or None"
        )
    if required or not named:
        return bool(required)
    return named[0].name == "trial" or (len(named) == 1 and named[0].default is None)
