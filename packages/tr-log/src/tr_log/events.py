"""Give a callback every event of a trainer: some trainers and libraries call each event on each callback."""

from __future__ import annotations

from typing import Any


def no_event(self: Any, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
    """Do nothing at an event."""


# A trainer that calls only what a callback does leaves such a method out.
no_event.__dict__["is_no_event"] = True


class EveryEvent:
    """Have all events, each with nothing to do; subclasses override those that matter."""

    on_init_end = on_train_begin = on_train_end = on_epoch_begin = on_epoch_end = no_event
    on_step_begin = on_substep_end = on_pre_optimizer_step = on_optimizer_step = on_step_end = no_event
    on_evaluate = on_predict = on_prediction_step = on_save = on_log = on_push_begin = no_event
