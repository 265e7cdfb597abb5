"""Go back before a step that spoils a run, leave out its batches, and go on (`on_spike="rewind"`)."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch

from tr_core.loop import log_evaluate_save, run_epochs
from tr_core.metric_means import accumulator_dtype
from tr_core.run import Run
from tr_core.snapshot import Snapshot
from tr_log import get_logger

logger = get_logger("tr_core.trainer")

WINDOW, LEAST = 128, 32
"""Number of losses that a new one is compared with: the last ones of good steps; and how many there must be."""
_DEVIATION = 1.4826  # of a normal distribution, by its median absolute deviation
_NARROWEST = 1e-3  # of the median: losses that hardly change make no small change a spike


class _SpoiltError(Exception):
    """Raised at the first step that spoils the run, once it is known."""

    def __init__(self, number: int, why: str, samples: tuple[int, int, int]) -> None:
        super().__init__(why)
        self.number, self.samples = number, samples


def run_epochs_with_rewinds(run: Run) -> None:
    """Train as `run_epochs` does, without the batches of steps that are not finite, or whose loss is a spike.

    The end has the bits of a run on data without these batches.

    Raises:
        FloatingPointError: that happened more than `max_rewinds` times.
    """
    recovery = Recovery(run)
    run.recovery, run.updates.guard = recovery, recovery
    recovery.take_snapshot()
    while True:
        try:
            run_epochs(run)
            recovery.check()
            return
        except _SpoiltError as spoilt:
            recovery.go_back(spoilt)


class Recovery:
    """Watches losses and norms, holds a snapshot of the run in memory, and goes back to it.

    A snapshot is taken every `snapshot_steps` steps, and after each save and evaluation. Before that losses and norms
    of the steps since are read, at once; they are the same on all ranks, and so are decisions.

    Args:
        run: the run, between two steps.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._losses: deque[float] = deque(maxlen=WINDOW)
        self._left_out: list[tuple[int, int, int]] = []  # epoch, first sample, and one past the last
        self._steps: list[tuple[int, tuple[int, int, int], torch.Tensor, torch.Tensor]] = []
        self._begin = (run.position.epoch, run.position.samples)
        self._snapshot = Snapshot()
        self._max_steps, self._fewer = run.methods.state.max_steps, 0
        self.load_state_dict(run.restored_recovery)

    def state_dict(self) -> dict[str, Any]:
        """Return the losses of good steps, and the batches that are left out."""
        return {"losses": list(self._losses), "left_out": [list(samples) for samples in self._left_out]}

    def load_state_dict(self, state_dict: Mapping[str, Any] | None) -> None:
        """Restore what `state_dict` returned; None for nothing."""
        known = state_dict or {"losses": [], "left_out": []}
        self._losses = deque(known["losses"], maxlen=WINDOW)
        self._left_out = [cast("tuple[int, int, int]", tuple(samples)) for samples in known["left_out"]]

    # What the loop asks

    def leaves_out_step(self) -> bool:
        """Note where a step begins, and return whether its batches are left out."""
        self._begin = (self._run.position.epoch, self._run.position.samples)
        return any(samples[:2] == self._begin for samples in self._left_out)

    def after_step(self, due: Callable[[Run], None] | None) -> Callable[[Run], None]:
        """Return what runs what is due after a step, and takes a snapshot if that is due after it."""
        due = due or log_evaluate_save

        def run_due(run: Run) -> None:
            control, step = run.methods.control, run.methods.state.global_step
            has_output = control.should_save or control.should_evaluate
            due(run)
            if has_output or step - (self._snapshot.step or 0) >= run.methods.args.snapshot_steps:
                self.check()
                self.take_snapshot()

        return run_due

    def look_at_gradients(self) -> None:
        """Do nothing: the norm shows a gradient that is not finite."""

    def leaves_out(self) -> None:
        """Note a step's loss and norm, to be read later; every update is applied."""
        window, end = self._run.window, self._run.position.samples
        self._steps.append((window.step, (*self._begin, end), window.step_loss, cast("torch.Tensor", window.grad_norm)))

    def check(self) -> None:
        """Read the losses and norms since the last call. Collective. Sync: once."""
        if not self._steps:
            return
        steps, self._steps = self._steps, []
        data = self._run.strategy.data
        dtype = accumulator_dtype(data.device)
        losses = data.sum(torch.stack([loss.detach().to(dtype) for *_, loss, _ in steps])) / data.world_size
        norms = torch.stack([norm.detach().to(dtype) for *_, norm in steps])
        for (number, samples, *_), loss, norm in zip(steps, losses.tolist(), norms.tolist(), strict=True):
            if (why := self._why_spoilt(loss, norm)) is not None:
                raise _SpoiltError(number, why, samples)
            self._losses.append(loss)

    def _why_spoilt(self, loss: float, norm: float) -> str | None:
        if not (math.isfinite(loss) and math.isfinite(norm)):
            return f"its loss is {loss:g}, its gradient norm {norm:g}"
        if len(self._losses) < LEAST:
            return None
        median = statistics.median(self._losses)
        spread = statistics.median(abs(each - median) for each in self._losses)
        limit = median + self._run.methods.args.spike_deviations * max(_DEVIATION * spread, _NARROWEST * abs(median))
        return f"its loss is {loss:g}, above {limit:g}" if loss > limit else None

    # Snapshots

    def take_snapshot(self) -> None:
        """Copy everything that a checkpoint has. Collective. Sync: once, for the open window."""
        self._snapshot.take(self._run)

    def go_back(self, spoilt: _SpoiltError) -> None:
        """Go back to the snapshot, and leave out the batches of the step from now on.

        Raises:
            FloatingPointError: that was done `max_rewinds` times already.
        """
        run, most = self._run, self._run.methods.args.max_rewinds
        left_out, (epoch, first, end) = [*self._left_out, spoilt.samples], spoilt.samples
        what = f"step {spoilt.number + 1} (samples {first} to {end - 1} in the order of epoch {epoch}): {spoilt}"
        if len(left_out) > most:
            raise FloatingPointError(
                f"{what}; batches of {most} steps were left out before (max_rewinds={most}). If it is not the data, "
                "lower learning_rate or max_grad_norm; or raise max_rewinds or spike_deviations"
            )
        if run.watch.has_other_parameters(run.methods.model):
            raise FloatingPointError(f"{what}; the model was given other parameters since, so the run cannot go back")
        self._snapshot.restore(run)
        run.methods.random_state.reapply()  # last: nothing may have drawn since
        self._left_out, self._steps = left_out, []
        if not run.plan.ends_by_steps:
            self._fewer += 1
            run.methods.state.max_steps = self._max_steps - self._fewer  # so that what is due at the end is done there
        logger.warning("%s; going on from step %d without these samples", what, self._snapshot.step)
