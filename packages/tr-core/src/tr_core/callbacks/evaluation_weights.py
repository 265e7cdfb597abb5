"""Use the callbacks' weights instead of the trained ones: to evaluate, to save, and at the end of the run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Literal

from torch import nn

from tr_core.protocols import EvaluationWeights, Stateful
from tr_core.state import TrainerState


def weight_parts(callbacks: Iterable[Any], model: nn.Module) -> dict[str, Stateful]:
    """Return the weights that callbacks hold, by their names in a checkpoint.

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
    """Swap the callbacks' weights for evaluation and export into the model, inside the block."""
    with ExitStack() as stack:
        for callback in _holders(callbacks):
            stack.enter_context(callback.evaluation_weights(model))
        yield


def adopt_evaluation_weights(callbacks: Iterable[Any], model: nn.Module, state: TrainerState) -> None:
    """Copy the evaluation weights into the model permanently, at the end of a run."""
    for callback in _holders(callbacks):
        callback.keep_evaluation_weights(model, state)


class OptimizerMode:
    """Switches an optimizer's two sets of weights in the model: training weights and evaluation weights.

    Schedule-free optimizers have two sets. `eval()` swaps the weights in place, and `train()` swaps them back. For
    optimizers without these methods nothing is called. After a run the model has the evaluation weights.

    Attributes:
        is_evaluating: whether the model has the evaluation weights.
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
        """Swap the evaluation weights into the model inside the block; a nested block does nothing."""
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
