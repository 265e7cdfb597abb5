"""Say what is wrong with a micro-batch whose forward, loss or backward failed, and what to do."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tr_core.preflight.origins import frames_of, passed_through
from tr_core.trainer_methods import TrainerMethods


@dataclass
class Failure:
    """An exception, and the micro-batch that it stopped."""

    error: Exception
    trainer: TrainerMethods
    inputs: Any

    @property
    def columns(self) -> Any:
        """The columns of the batch; its type where it has none."""
        return sorted(map(str, self.inputs)) if isinstance(self.inputs, Mapping) else type(self.inputs).__name__

    def local(self, function: str, name: str) -> Any:
        """Return a variable of the deepest call of a function that the exception came through; None without one."""
        found = [frame.f_locals for frame in frames_of(self.error) if frame.f_code.co_name == function]
        return found[-1].get(name) if found else None


def diagnose(failure: Failure) -> tuple[str, str]:
    """Return the code and the words of the first row that fits a failure."""
    found = ((code, says(failure)) for code, says in _TABLE)
    return next(((code, text) for code, text in found if text), ("T502", _fails(failure)))


def _not_one_number(failure: Failure) -> str | None:
    loss = failure.local("training_step", "loss")
    if not passed_through(failure.error, "backward") or not isinstance(loss, torch.Tensor) or loss.dim() == 0:
        return None
    return f"the loss has the shape {tuple(loss.shape)}; it must be one number: take the mean over samples or targets"


def _without_gradient(failure: Failure) -> str | None:
    loss = failure.local("training_step", "loss")
    if not passed_through(failure.error, "backward") or not isinstance(loss, torch.Tensor) or loss.requires_grad:
        return None
    return (
        "the loss does not depend on any trainable parameter: it was computed without gradients (no_grad, detach, "
        ".item()) or from frozen parts alone; compute it from the model's outputs as they are"
    )


def _outside_of_classes(failure: Failure) -> str | None:
    fails = passed_through(failure.error, "cross_entropy", "nll_loss") and isinstance(failure.error, IndexError)
    return "a label is outside the model's classes" if fails else None


def _no_loss(failure: Failure) -> str | None:
    names, inputs = failure.trainer.label_names, failure.inputs
    if isinstance(inputs, Mapping) and names and not set(names) & set(inputs):
        return f"the model gives no loss: no {' or '.join(names)} among {failure.columns}"
    fails = passed_through(failure.error, "loss_of", "split_loss")
    return f"the model gives no loss: the batch has {failure.columns}" if fails else None


def _fails(failure: Failure) -> str:
    part = "backward" if passed_through(failure.error, "backward") else "forward"
    return f"the {part} pass of a batch with {failure.columns} fails"


_TABLE: tuple[tuple[str, Callable[[Failure], str | None]], ...] = (
    ("T504", _not_one_number),
    ("T505", _without_gradient),
    ("T405", _outside_of_classes),
    ("T503", _no_loss),
)
