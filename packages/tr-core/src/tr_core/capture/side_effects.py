"""Find what the Python code of a model does beside operations on tensors: a capture would not do it again."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from operator import is_
from typing import Any

import numpy as np
import torch
from torch import nn

from tr_core.capture.values import NotCapturableError


@contextmanager
def without_trace(model: nn.Module) -> Iterator[None]:
    """Undo what Python code in the block leaves behind, and refuse code that leaves something.

    Raises:
        NotCapturableError: an attribute of a module was changed, a random number of Python or numpy was drawn, or the
            state of torch's random numbers was set. A capture would not do that again.
    """
    modules = list(model.modules())
    noted = [(f"{type(module).__name__}.", vars(module), _contents(vars(module))) for module in modules]
    noted += [(f"{type(module).__name__}.", module._buffers, _contents(module._buffers)) for module in modules]
    drawn: Any = (random.getstate(), np.random.get_state())
    set_states: list[torch.Tensor] = []
    set_state = torch.set_rng_state
    torch.set_rng_state = lambda state: set_states.append(state)
    try:
        yield
    finally:
        torch.set_rng_state = set_state
        changed = [name for where, own, before in noted for name in _restore(where, own, before)]
        after: Any = (random.getstate(), np.random.get_state())
        random.setstate(drawn[0])
        np.random.set_state(drawn[1])
    if changed:
        raise NotCapturableError(f"its forward sets {', '.join(changed[:5])}, which a capture would not do again")
    if after[0] != drawn[0] or after[1][2] != drawn[1][2] or not np.array_equal(after[1][1], drawn[1][1]):
        raise NotCapturableError("it draws random numbers by Python or numpy, which a capture would not draw again")
    if set_states:
        raise NotCapturableError("it sets the state of random numbers, as checkpointing of activations does")


Contents = dict[str, tuple[Any, Any]]


def _contents(own: dict[str, Any]) -> Contents:
    """Return the values of a dict, and a copy of those that may grow in place."""
    return {key: (value, copy(value) if type(value) in (list, dict, set) else None) for key, value in own.items()}


def _restore(where: str, own: dict[str, Any], before: Contents) -> list[str]:
    """Give a dict its values back; return the names of those that were others."""
    changed = [where + key for key in own if key not in before]
    for key, (value, content) in before.items():
        if key not in own or own[key] is not value:
            changed.append(where + key)
        elif content is not None and not _holds_the_same(value, content):
            changed.append(where + key)
            value.clear()
            (value.extend if isinstance(value, list) else value.update)(content)
    for key in [key for key in own if key not in before]:
        del own[key]
    own.update({key: value for key, (value, _) in before.items()})
    return changed


def _holds_the_same(now: Any, before: Any) -> bool:
    if len(now) != len(before):
        return False
    if isinstance(now, dict):
        return all(key in now and now[key] is value for key, value in before.items())
    return all(map(is_, now, before)) if isinstance(now, list) else now == before
