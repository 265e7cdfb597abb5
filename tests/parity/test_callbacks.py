"""Callbacks: the order of events, and what the flags of the control do."""

import parity_data as data
import parity_models as models
import pytest

EVALUATION = data.classes(9, seed=8)


class At:
    """Set flags of the control at one event of one step; for both trainers, as it inherits from neither's base."""

    def __init__(self, event, step, **flags):
        self.event, self.step, self.flags = event, step, flags

    def __getattr__(self, name):
        if not name.startswith("on_"):
            raise AttributeError(name)

        def act(args, state, control, **kwargs):
            if name == self.event and state.global_step == self.step:
                for flag, value in self.flags.items():
                    setattr(control, flag, value)

        return act
