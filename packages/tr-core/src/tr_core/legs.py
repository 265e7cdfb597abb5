"""Train on the processes that there are: those that are left go on in memory when one is lost, or has come back.

A run is then made in legs. Each begins as a resume does, with a snapshot in place of a checkpoint: processes that have
none, as new ones, get it from one that has.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from tr_core.run import Run
from tr_core.snapshot import Snapshot
from tr_core.trainer_methods import TrainerMethods
from tr_log import get_logger

logger = get_logger("tr_core.trainer")

Result = TypeVar("Result")


class LegEndedError(Exception):
    """Raised between two steps, on all ranks: a process waits to be taken in."""


class Legs:
    """The legs of one call of `train`, and the snapshot that the next one begins with.

    Args:
        members: who trains together; see `Members`.
        every: number of steps between two snapshots; there is one after each save and evaluation too.
    """

    def __init__(self, members: Any, every: int) -> None:
        self._members, self._every = members, every
        self._snapshot = Snapshot()
        self._read: Callable[[], list[int]] = lambda: [0]
        self._goes_on = False

    def train(self, methods: TrainerMethods, train: Callable[[], Result]) -> Result:
        """Return what `train` returns; it is called again if a process was lost, or waits."""
        while True:
            methods.meet()
            self._read, self._goes_on = lambda: [0], False
            try:
                result = train()
            except LegEndedError:
                logger.info("a process has come: going on with it from step %s", self._snapshot.step)
                continue
            except Exception:
                if not self._goes_on and not self._members.lost_a_rank():
                    raise
                logger.warning("going on without it from step %s", self._snapshot.step or 0)
                continue
            self._members.end()
            return result

    def goes_on_after(self, error: BaseException) -> bool:
        """Whether another leg follows an exception."""
        is_lost = isinstance(error, Exception) and not isinstance(error, LegEndedError) and self._members.lost_a_rank()
        self._goes_on = isinstance(error, LegEndedError) or is_lost
        return self._goes_on

    def restore(self, run: Run) -> bool:
        """Set a run that was just built to the newest snapshot of any rank; False if there is none. Collective."""
        steps = run.strategy.gather_objects(self._snapshot.step)
        known = [step for step in steps if step is not None]
        if not known:
            return False
        if len(set(steps)) > 1:
            self._snapshot = self._members.share(self._snapshot, steps.index(max(known)))
        self._snapshot.restore(run)
        return True

    def begin(self, run: Run) -> None:
        """Take the first snapshot, before the first step."""
        if self._snapshot.step is None:
            self._snapshot.take(run)

    def after_step(self, due: Callable[[Run], None]) -> Callable[[Run], None]:
        """Return what runs what is due after a step, and then takes a snapshot, or ends the leg, if that is due."""

        def run_due(run: Run) -> None:
            control, state = run.methods.control, run.methods.state
            has_output = control.should_save or control.should_evaluate
            due(run)
            ends = self._is_agreed(run) and not control.should_training_stop
            if ends or has_output or state.global_step - (self._snapshot.step or 0) >= self._every:
                self._snapshot.take(run)
            if ends:
                raise LegEndedError

        return run_due

    def _is_agreed(self, run: Run) -> bool:
        """Whether a rank knew a step ago that a process waits: so all know it after the same step, and none waits."""
        known, self._read = self._read()[0], run.strategy.all_reduce_max([int(self._members.is_awaited)])
        return known > 0
