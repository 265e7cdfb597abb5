"""Callbacks of the scenarios."""

from typing import Any


class At:
    """Set flags of the control at one event of one step; for both trainers, as it inherits from neither's base.

    Args:
        event: name of the event.
        step: `global_step` at which to act.
        flags: what to set.
    """

    def __init__(self, event: str, step: int, **flags: bool) -> None:
        self.event, self.step, self.flags = event, step, flags

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("on_"):
            raise AttributeError(name)

        def act(args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if name == self.event and state.global_step == self.step:
                for flag, value in self.flags.items():
                    setattr(control, flag, value)

        return act
