"""Check implementations of the seams, and reach what tests of a plugin need and a run does not offer.

The functions `check_...` raise `AssertionError` with the rule that an implementation breaks.
"""

from tr_core.callback import EVENTS
from tr_core.callbacks.ema import WeightAverage
from tr_core.checkpoint.settings import fingerprint
from tr_core.compat.refused_hooks import REFUSED
from tr_core.data.length_grouping import LengthGrouping, measure_lengths
from tr_core.label_smoothing import LabelSmoother
from tr_core.optim.optimizers import optimizer_names
from tr_core.preemption.signals import Interrupted
from tr_core.random_state import RandomState
from tr_core.testing.conditions import set_clock, set_loss_scaler
from tr_core.testing.conformance import (
    check_checkpointer,
    check_collectives,
    check_evaluation_weights,
    check_in_backward,
    check_strategy,
)


def refused_hooks() -> dict[str, str]:
    """Return the methods of transformers' Trainer that a subclass must not override, and what to override instead."""
    return dict(REFUSED)


__all__ = [
    "EVENTS",
    "Interrupted",
    "LabelSmoother",
    "LengthGrouping",
    "RandomState",
    "WeightAverage",
    "check_checkpointer",
    "check_collectives",
    "check_evaluation_weights",
    "check_in_backward",
    "check_strategy",
    "fingerprint",
    "measure_lengths",
    "optimizer_names",
    "refused_hooks",
    "set_clock",
    "set_loss_scaler",
]
