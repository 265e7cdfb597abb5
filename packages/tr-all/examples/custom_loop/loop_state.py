"""Keep what a loop knows of itself: what a checkpoint holds of it, and what the callbacks of tr-log are shown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any


@dataclass
class LoopState:
    """Where a run is, as one part of its checkpoints.

    Attributes:
        max_steps: steps of the whole run.
        num_train_epochs: passes that these are, rounded up.
        is_world_process_zero: whether this process writes the files.
        global_step: steps done.
        log_history: what was logged, each entry with its step.
        best_metric: best value of a watched metric; this loop watches none.
        best_global_step: its step.
    """

    max_steps: int
    num_train_epochs: int
    is_world_process_zero: bool
    global_step: int = 0
    log_history: list[dict[str, Any]] = field(default_factory=list)
    best_metric: float | None = None
    best_global_step: int | None = None

    def state_dict(self) -> dict[str, Any]:
        """Return what cannot be known anew from the arguments."""
        return {"global_step": self.global_step, "log_history": self.log_history}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Take over what `state_dict` returned."""
        self.global_step, self.log_history = state_dict["global_step"], state_dict["log_history"]


class Events:
    """Tell callbacks, any objects with methods named after a Trainer's events, what happens in a loop.

    Args:
        callbacks: they, in the order in which they are told.
        output_dir: folder of the run.
        state: of the loop; the callbacks read it.
    """

    def __init__(self, callbacks: Sequence[Any], output_dir: str, state: LoopState) -> None:
        self._callbacks, self._state = callbacks, state
        self._args = SimpleNamespace(output_dir=output_dir, disable_tqdm=False)

    def fire(self, event: str, **more: Any) -> None:
        """Call the method `event` of every callback that has it."""
        for callback in self._callbacks:
            if (method := getattr(callback, event, None)) is not None:
                method(self._args, self._state, None, **more)

    def log(self, entry: dict[str, float]) -> None:
        """Add an entry to the history and show it."""
        self._state.log_history.append({**entry, "step": self._state.global_step})
        self.fire("on_log", logs=entry)
