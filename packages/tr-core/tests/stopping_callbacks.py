"""End a run from within, as a process that dies ends it."""

from tr_core import TrainerCallback


class Stop(Exception):
    """Stands for whatever ends a process."""


class StopAt(TrainerCallback):
    """Raises `Stop` before the step after `step`."""

    def __init__(self, step):
        self.step = step

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            raise Stop
