"""Check that what is named as labels can reach the model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tr_core.losses.targets import takes_argument
from tr_core.model_io import base_model, forward_parameters

if TYPE_CHECKING:
    from tr_core.trainer import Trainer


def check_label_names(trainer: Trainer) -> None:
    """Raise where `label_names` names what the model cannot be given: without a loss, or late, training would fail.

    Raises:
        ValueError: the forward does not take one of them, and nothing takes it out of the batch before.
    """
    names, base = trainer.args.label_names or [], base_model(trainer.model)
    taken_out = ["labels"] if trainer.loss_function is not None else []
    unknown = [name for name in names if name not in taken_out and not takes_argument(base.forward, name)]
    # A subclass that computes the loss itself may take them out of the inputs.
    methods = type(trainer).compute_loss, type(trainer).training_step
    if unknown and all(method.__module__.startswith("tr_core.") for method in methods):
        raise ValueError(
            f"label_names={names}, but the forward of {type(base).__name__} takes no {', '.join(map(repr, unknown))}, "
            f"only {list(forward_parameters(base))}; leave label_names out, or name arguments of the forward, or "
            "override compute_loss and take those labels out of the inputs there"
        )
