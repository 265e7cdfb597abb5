"""Ask the callbacks for other weights than those being trained: to evaluate, to save, and to keep at the end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Literal

from tr_core.protocols import EvaluationWeights, Stateful

if TYPE_CHECKING:
    from tr_core.trainer.trainer import Trainer


def weight_parts(trainer: Trainer) -> dict[str, Stateful]:
    """Return what callbacks hold of the weights, by its names in a checkpoint.

    Raises:
        ValueError: two callbacks use one name.
    """
    parts: dict[str, Stateful] = {}
    for callback in _holders(trainer):
        given = callback.weight_parts(trainer.model)
        if taken := sorted(set(given) & set(parts)):
            raise ValueError(
                f"two callbacks give a part of the checkpoint the name {taken[0]!r}; the second is a "
                f"{type(callback).__name__}: remove one of them"
            )
        parts |= given
    return parts


@contextmanager
def evaluation_weights(trainer: Trainer) -> Iterator[None]:
    """Have the model hold the weights to evaluate and to export inside the block, and those that train after it."""
    with ExitStack() as stack:
        stack.enter_context(optimizer_in_evaluation(trainer))
        for callback in _holders(trainer):
            stack.enter_context(callback.evaluation_weights(trainer.model))
        yield


@contextmanager
def optimizer_in_evaluation(trainer: Trainer) -> Iterator[None]:
    """Have an optimizer that knows two sets of weights put those to judge into the model; during a run only.

    Such are schedule-free optimizers: `eval()` exchanges the weights in place, and `train()` takes it back. Inside
    another such block nothing is done. After a run the model has the weights to judge.
    """
    if not trainer.is_in_train or trainer.is_optimizer_in_evaluation:
        yield
        return
    switch_optimizer(trainer, "eval")
    try:
        yield
    finally:
        switch_optimizer(trainer, "train")


def switch_optimizer(trainer: Trainer, mode: Literal["train", "eval"]) -> None:
    """Call `train()` or `eval()` of the Trainer's optimizer, if it has both."""
    trainer.is_optimizer_in_evaluation = mode == "eval"
    methods = [getattr(trainer.optimizer, name, None) for name in ("train", "eval")]
    if all(map(callable, methods)):
        getattr(trainer.optimizer, mode)()


def adopt_evaluation_weights(trainer: Trainer) -> None:
    """Leave the model with the weights to evaluate, at the end of a run."""
    for callback in _holders(trainer):
        callback.keep_evaluation_weights(trainer.model, trainer.state)


def _holders(trainer: Trainer) -> list[EvaluationWeights]:
    return [callback for callback in trainer.callback_handler.callbacks if isinstance(callback, EvaluationWeights)]
