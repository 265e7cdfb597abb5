"""Look whether there is anything to train."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from tr_core.checks import check_quantized
from tr_core.preflight.report import Problem
from tr_core.preflight.subject import Subject


def check_trainable(subject: Subject) -> Iterator[Problem]:
    """Find a model whose parameters are all frozen, or quantized without an adapter."""
    model = subject.trainer.model
    if subject.trains:
        try:
            check_quantized(model)
        except ValueError as error:
            yield Problem("T513", str(error))
            return
    if subject.trains and not is_trainable(model):
        total = sum(1 for _ in model.parameters())
        yield Problem(
            "T501",
            f"none of the {total} parameters of {type(model).__name__} is trainable; set requires_grad where training "
            "is to change something",
        )


def is_trainable(model: nn.Module) -> bool:
    """Whether a model has a parameter that training changes."""
    return any(parameter.requires_grad for parameter in model.parameters())
