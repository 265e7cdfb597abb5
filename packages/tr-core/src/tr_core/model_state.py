"""Save and restore all of a model, also where its `state_dict` was replaced by one that gives less."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType
from typing import TYPE_CHECKING, Any

from torch import nn

from tr_core.protocols import Stateful

if TYPE_CHECKING:
    from tr_core.trainer import Trainer


def model_part(trainer: Trainer) -> Stateful:
    """Return the part of a checkpoint that is the whole model."""
    part = trainer.strategy.stateful(trainer.model_wrapped, None)["model"]
    return WholeState(part, trainer.model) if _gives_another_state(trainer.model) else part


class WholeState:
    """A model's part whose state is that of all its parameters and buffers, under their own names.

    Scripts replace a model's `state_dict` so that `save_pretrained` writes an adapter alone. What they leave out, or
    give another name, could not be loaded again by `load_state_dict`, so a checkpoint does not go by it.

    Args:
        part: what a strategy saves and restores the model by; it calls the model's own methods.
        model: the unwrapped model.
    """

    def __init__(self, part: Stateful, model: nn.Module) -> None:
        self._part, self._model = part, model

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state."""
        with _own_methods(self._model):
            return self._part.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Load a whole state."""
        with _own_methods(self._model):
            self._part.load_state_dict(state_dict)


def _gives_another_state(model: nn.Module) -> bool:
    return "state_dict" in vars(model) or _class_gives_another(model)


def _class_gives_another(model: nn.Module) -> bool:
    """Whether a class changes which names its state has, and not how it is loaded."""
    kind = type(model)
    if kind.state_dict is nn.Module.state_dict or kind.load_state_dict is not nn.Module.load_state_dict:
        return False
    return set(kind.state_dict(model)) != set(nn.Module.state_dict(model))


@contextmanager
def _own_methods(model: nn.Module) -> Iterator[None]:
    held = vars(model)
    replaced = held.pop("state_dict", None)
    if _class_gives_another(model):
        held["state_dict"] = MethodType(nn.Module.state_dict, model)
    try:
        yield
    finally:
        held.pop("state_dict", None)
        if replaced is not None:
            held["state_dict"] = replaced
