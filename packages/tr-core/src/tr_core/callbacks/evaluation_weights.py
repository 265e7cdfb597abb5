"""Ask the callbacks for other weights than those being trained: to evaluate, to save, and to keep at the end."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Literal

from torch import nn

from tr_core.protocols import EvaluationWeights, Stateful
from tr_core.state import TrainerState


def weight_parts(callbacks: Iterable[Any], model: nn.Module) -> dict[str, Stateful]:
    """Return what callbacks hold of the weights, by its names in a checkpoint.

    Raises:
        ValueError: two callbacks use one name.
    """
    parts: dict[str, Stateful] = {}
    for callback in _holders(callbacks):
        given = callback.weight_parts(model)
        if taken := sorted(set(given) & set(parts)):
            raise ValueError(
                f"two callbacks give a part of the checkpoint the name {taken[0]!r}; the second is a "
                f"{type(callback).__name__}: remove one of them"
            )
        parts |= given
    return parts


@contextmanager
def evaluation_weights(callbacks: Iterable[Any], model: nn.Module) -> Iterator[None]:
    """Have the model hold the weights that callbacks give to evaluate and to export, inside the block."""
    with ExitStack() as stack:
        for callback in _holders(callbacks):
            stack.enter_context(callback.evaluation_weights(model))
        yield


def adopt_evaluation_weights(callbacks: Iterable[Any], model: nn.Module, state: TrainerState) -> None:
    """Leave the model with the weights to evaluate, at the end of a run."""
    for callback in _holders(callbacks):
        callback.keep_evaluation_weights(model, state)


class OptimizerMode:
    """Which of its two sets of weights an optimizer has put into the model: those that train, or those to judge.

    Schedule-free optimizers know two: `eval()` exchanges the weights in place, and `train()` takes it back. Other
    optimizers have no such methods, and nothing is called. After a run the model has the weights to judge.

    Attributes:
        is_evaluating: whether the model has those to judge.
    """

    def __init__(self) -> None:
        self.is_evaluating = False

    def switch(self, optimizer: Any, mode: Literal["train", "eval"]) -> None:
        """Call `train()` or `eval()` of an optimizer, if it has both."""
        self.is_evaluating = mode == "eval"
        methods = [getattr(optimizer, name, None) for name in ("train", "eval")]
        if all(map(callable, methods)):
            getattr(optimizer, mode)()

    @contextmanager
    def evaluating(self, optimizer: Any) -> Iterator[None]:
        """Have the model hold the weights to judge inside the block; inside another such block nothing is done."""
        if self.is_evaluating:
            yield
            return
        self.switch(optimizer, "eval")
        try:
            yield
        finally:
            self.switch(optimizer, "train")


def _holders(callbacks: Iterable[Any]) -> list[EvaluationWeights]:
    return [callback for callback in callbacks if isinstance(callback, EvaluationWeights)]
