"""Predict: run the model on one evaluation batch, and find its loss, its outputs and its labels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from tr_core.evaluation.outputs import map_objects, map_tensors
from tr_core.losses.item_count import plain

if TYPE_CHECKING:
    from tr_core.trainer import Trainer


def prediction_step(
    trainer: Trainer,
    model: torch.nn.Module,
    inputs: Any,
    prediction_loss_only: bool,
    ignore_keys: list[str] | None,
) -> tuple[torch.Tensor | None, Any, Any]:
    """Run the model on one batch without gradients.

    Returns:
        Loss (None without labels), logits (None if only the loss is wanted), labels (None without, and an empty tuple
        where the model computes its loss without any).
    """
    is_positional = isinstance(inputs, list | tuple) and trainer.loss_function is not None
    named_labels = labels_in(trainer, inputs)
    needs_no_labels = not trainer.label_names and _returns_loss(trainer, inputs)
    gives_loss = named_labels is not None or is_positional or needs_no_labels
    ignored = _ignored_outputs(trainer.model) if ignore_keys is None else ignore_keys
    detach = map_objects if trainer.args.eval_use_gather_object else map_tensors
    # Taken before the forward: computing the loss may take them out of the inputs.
    labels = inputs[-1] if is_positional else detach(torch.Tensor.detach, named_labels)
    if needs_no_labels and labels is None:
        labels = ()  # there are none to wait for: metrics are computed of the predictions
    loss = None
    with torch.no_grad(), trainer.loss_context():
        if gives_loss:
            loss, outputs = trainer.loss_and_outputs(model, inputs)
            loss = loss.detach().mean()
        else:
            outputs = trainer.call_model(model, inputs)
    if prediction_loss_only:
        return loss, None, None
    kept = _kept_outputs(outputs, [*ignored, "loss"], skip_first=gives_loss and trainer.loss_function is None)
    logits = detach(_detached, kept)
    return loss, logits[0] if len(logits) == 1 else logits, labels


def _detached(tensor: torch.Tensor) -> torch.Tensor:
    return plain(tensor.detach())


def _returns_loss(trainer: Trainer, inputs: Any) -> bool:
    """Whether the model gives a loss without labels: as the batch asks for, else as its forward does by default."""
    asked = inputs.get("return_loss") if isinstance(inputs, Mapping) else None
    return trainer.can_return_loss if asked is None else bool(asked)


def labels_in(trainer: Trainer, inputs: Any) -> Any:
    """Return the labels of a batch that names its parts: a tuple where there are several; None if one is missing."""
    names = trainer.label_names
    if not names or not isinstance(inputs, Mapping) or any(inputs.get(name) is None for name in names):
        return None
    labels = tuple(inputs[name] for name in names)
    return labels[0] if len(labels) == 1 else labels


def _ignored_outputs(model: torch.nn.Module) -> list[str]:
    config = getattr(model, "config", None)
    return [] if config is None else getattr(config, "keys_to_ignore_at_inference", ["past_key_values"])


def _kept_outputs(outputs: Any, ignored: list[str], skip_first: bool) -> tuple[Any, ...]:
    if isinstance(outputs, Mapping):
        return tuple(value for key, value in outputs.items() if key not in ignored)
    if isinstance(outputs, list | tuple):
        return tuple(outputs[1:] if skip_first else outputs)
    if hasattr(outputs, "__dict__") and not isinstance(outputs, torch.Tensor):
        return tuple(value for key, value in vars(outputs).items() if key not in ignored)
    return (outputs,)
