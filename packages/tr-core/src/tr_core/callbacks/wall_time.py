"""Log, evaluate, save and stop by the clock."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from tr_args import Duration, TrainingArguments
from tr_core.callback import TrainerCallback
from tr_core.protocols import Collectives
from tr_core.state import TrainerControl, TrainerState
from tr_log import get_logger

logger = get_logger(__name__)

# Actions that can be due at an interval.
ACTIONS = ("log", "evaluate", "save")


class WallTimeCallback(TrainerCallback):
    """Request logs, evaluations and checkpoints at intervals of wall time, and end the run after `max_time`.

    An action is due at the first step that ends at least one interval after the last one. For a checkpoint, the last
    checkpoint of any cause counts. The elapsed part of the interval is saved with a checkpoint, and a resumed run
    counts on from it. Time between two runs does not count. `max_time` counts from the beginning of this call of
    `train`.

    With several ranks, the clock of rank 0 decides. The other ranks receive its flags like any callback flags
    (`tr_core.preemption.preemption`). No rank blocks; all ranks act at the end of the next step.

    Args:
        args: training arguments; `logging_strategy`, `eval_strategy`, `save_strategy` and `max_time` are read.
        collectives: who this process is among the others.
        clock: returns seconds, never fewer than before.
    """

    def __init__(
        self, args: TrainingArguments, collectives: Collectives, clock: Callable[[], float] = time.monotonic
    ) -> None:
        strategies = (args.logging_strategy, args.eval_strategy, args.save_strategy)
        self._periods_s = {
            action: strategy.seconds
            for action, strategy in zip(ACTIONS, strategies, strict=True)
            if isinstance(strategy, Duration)
        }
        self._limit_s = None if args.max_time is None else args.max_time.seconds
        self._decides, self._has_others, self._clock = collectives.rank == 0, collectives.world_size > 1, clock
        self._began_s = clock()
        self._last_s: dict[str, float] = {}
        self._restored_s: dict[str, float] = {}
        self._under_way: dict[str, int] = {}  # requested action -> step at whose end it was requested
        self._is_over = False

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Start the clock, from where a checkpoint stopped it."""
        self._began_s = self._clock()
        self._last_s = {action: self._began_s - self._restored_s.get(action, 0.0) for action in self._periods_s}
        self._restored_s, self._under_way, self._is_over = {}, {}, False

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Restart the interval of each action that was done since the last step."""
        for action, step in list(self._under_way.items()):
            if state.global_step >= step + self._has_others:  # with several ranks, it may be done one step later
                self._last_s[action] = self._clock()
                del self._under_way[action]

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Request the actions that are due."""
        if not self._decides:
            return
        now = self._clock()
        due = [action for action in self._due(now) if action != "evaluate" or state.global_step >= args.eval_delay]
        self._under_way |= dict.fromkeys(due, state.global_step)
        control.should_log |= "log" in due
        control.should_evaluate |= "evaluate" in due
        control.should_save |= "save" in due
        if self._limit_s is not None and now - self._began_s >= self._limit_s and state.global_step < state.max_steps:
            self._is_over = control.should_training_stop = True
            # The stop ends the epoch at this step; an epoch strategy saves there.
            control.should_save |= args.save_strategy not in ("no", "epoch")

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Log when the time is over."""
        if self._is_over and control.should_training_stop:
            logger.info("%s", _farewell(args, state))

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Restart the interval of checkpoints."""
        if "save" in self._last_s:
            self._last_s["save"] = self._clock()

    def state_dict(self) -> dict[str, Any]:
        """Return the current seconds since each action; a checkpoint is being saved."""
        now, under_way = self._clock(), (*self._under_way, "save")
        return {
            f"seconds_since_{action}": 0.0 if action in under_way else now - last_s
            for action, last_s in self._last_s.items()
        }

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Load the seconds; an action without an interval in the saved run begins at 0."""
        prefix = "seconds_since_"
        self._restored_s = {name.removeprefix(prefix): seconds for name, seconds in state_dict.items()}

    def _due(self, now: float) -> list[str]:
        return [
            action
            for action, period_s in self._periods_s.items()
            if action not in self._under_way and now - self._last_s[action] >= period_s
        ]


def _farewell(args: TrainingArguments, state: TrainerState) -> str:
    where = f"max_time={str(args.max_time)!r} is over: training stops at step {state.global_step} of {state.max_steps}"
    if args.save_strategy == "no":
        return f"{where}; save_strategy='no', so there is no checkpoint to go on from"
    if args.save_only_model:
        return f"{where}; save_only_model=True, so its checkpoint holds the weights, but no run can go on from it"
    return f"{where}, and saves it; train(resume_from_checkpoint=True) with the same arguments goes on from there"
