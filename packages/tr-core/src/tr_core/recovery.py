"""Go back and go on: to the beginning of a step that runs out of memory, or to a snapshot before one that is spoilt."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from tr_args import TrainingArguments
from tr_core.batch_size_search import find_common_size, next_size, no_smaller, reduce_batch_size
from tr_core.loop import log_evaluate_save, run_epochs
from tr_core.metric_means import accumulator_dtype
from tr_core.optim.fused_backward import kind
from tr_core.random_state import RandomState
from tr_core.run import Run
from tr_core.runtime.memory import free_memory, is_out_of_memory
from tr_core.snapshot import Snapshot, discard_step
from tr_log import get_logger

logger = get_logger("tr_core.trainer")

WINDOW, LEAST = 128, 32
"""Number of losses that a new one is compared with: the last ones of good steps; and how many there must be."""
_DEVIATION = 1.4826  # of a normal distribution, by its median absolute deviation
_NARROWEST = 1e-3  # of the median: losses that hardly change make no small change a spike


def spike_limit(losses: Sequence[float], deviations: float) -> float:
    """Return the loss above which one is a spike beside others: so many deviations above their median."""
    median = statistics.median(losses)
    spread = statistics.median(abs(each - median) for each in losses)
    return median + deviations * max(_DEVIATION * spread, _NARROWEST * abs(median))


class SpoiltError(Exception):
    """Raised at the first step that spoils the run, with its number, its samples and why it is one."""


def run_epochs_with_recovery(run: Run) -> None:
    """Train as `run_epochs` does, and recover from what the arguments name.

    With `auto_find_batch_size` a step that runs out of memory is made again with smaller micro-batches and the same
    samples. With `on_spike` the batches of a step are left out that is not finite, or whose loss is a spike: the end
    has the bits of a run on data without them.

    Raises:
        RuntimeError: one sample is too many, or memory ran out where a smaller micro-batch does not help.
        ValueError: the optimizer applies gradients before the step's end, or the loader has its own batch size.
        FloatingPointError: a step was spoilt more than `max_rewinds` times.
    """
    args = run.methods.args
    memory = MemoryRecovery(run) if args.auto_find_batch_size else None
    try:
        # After a common size is found, which its snapshot has.
        spikes = SpikeRecovery(run) if args.on_spike is not None else None
        while True:
            try:
                run_epochs(run)
                run.updates.check()
                return
            except Exception as error:
                recovery = next((each for each in (memory, spikes) if each is not None and each.takes(error)), None)
                if recovery is None:
                    raise
            recovery.go_back()  # after the block: the error's frames hold tensors
    finally:
        if memory is not None:
            run.methods.callback_handler.pop(memory)


class MemoryRecovery:
    """Makes a step again with smaller micro-batches if it runs out of memory: a callback that runs before all others.

    Weights change in the optimizer alone, so a step before it needs no copy of them. Several ranks choose a common
    size before the first step.
    """

    def __init__(self, run: Run) -> None:
        if kind(run.optimizer) == "backward-update":
            raise ValueError(
                f"auto_find_batch_size=True cannot make a step again with {type(run.optimizer).__name__}, which "
                "changes weights during the backward; set per_device_train_batch_size yourself"
            )
        if run.strategy.world_size > 1:
            find_common_size(run)
        run.methods.callback_handler.add(self, first=True)
        self._run = run
        self._forward = ForwardState(run.methods.model, run.strategy.device)
        self._noted: list[tuple[Any, dict[str, Any]]] = []
        self.is_in_step = self.is_in_optimizer = False

    def on_step_begin(self, args: TrainingArguments, state: Any, control: Any, **kwargs: Any) -> None:
        """Record what a step changes before its optimizer acts. Nothing is read from the device."""
        self._forward.record()
        window = self._run.window
        known = (self._run.position, window, window.means, window.tokens, window.throughput)
        parts = [part for part in known if part is not None]
        self._noted = [(part, {name: _copy(value) for name, value in vars(part).items()}) for part in parts]
        self.is_in_step = True

    def on_pre_optimizer_step(self, args: TrainingArguments, state: Any, control: Any, **kwargs: Any) -> None:
        """Mark that weights change from here."""
        self.is_in_step, self.is_in_optimizer = False, True

    def on_optimizer_step(self, args: TrainingArguments, state: Any, control: Any, **kwargs: Any) -> None:
        """Mark that a step is complete."""
        self.is_in_optimizer = False

    def takes(self, error: Exception) -> bool:
        """Whether memory ran out in a step; what the step held is freed then."""
        if not is_out_of_memory(error) or not (self.is_in_step or self.is_in_optimizer):
            return False
        if (reason := self._why_not()) is not None:
            raise RuntimeError(reason) from error
        free_memory(error, self._run.strategy.device)
        return True

    def go_back(self) -> None:
        """Restore everything to the beginning of the step, without its gradients, and reduce the micro-batch."""
        self.is_in_step = False
        discard_step(self._run)
        for part, values in self._noted:
            vars(part).update(values)
        self._forward.restore()
        self._run.position.is_retry = True
        reduce_batch_size(self._run, next_size(self._run.methods.args))

    def _why_not(self) -> str | None:
        """Return why a smaller micro-batch does not help; None if it may."""
        methods, strategy = self._run.methods, self._run.strategy
        size, step = methods.args.train_batch_size, methods.state.global_step
        if self.is_in_optimizer:
            return (
                f"memory ran out in the optimizer at step {step}, where the micro-batch makes no difference and "
                "weights may have changed already; use an optimizer with a smaller state, or shard it"
            )
        if strategy.world_size > 1:
            return (
                f"memory ran out on rank {strategy.rank} at step {step} with {size} samples a device and micro-batch, "
                "which had fitted before the first step; the other ranks are in the middle of theirs, so the size "
                f"cannot be changed now: set per_device_train_batch_size below {size} and resume"
            )
        return no_smaller(f"at step {step}") if size == 1 else None


class SpikeRecovery:
    """Watches losses and norms, holds a snapshot of the run in memory, and goes back to it.

    A snapshot is taken every `snapshot_steps` steps, and after each save and evaluation. Before that losses and norms
    of the steps since are read, at once; they are the same on all ranks, and so are decisions.

    Args:
        run: the run, between two steps.

    Attributes:
        snapshot: that of the last step to go back to.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._losses: deque[float] = deque(maxlen=WINDOW)
        self._left_out: list[tuple[int, int, int]] = []  # epoch, first sample, and one past the last
        self._steps: list[tuple[int, tuple[int, int, int], torch.Tensor, torch.Tensor]] = []
        self._begin = (run.position.epoch, run.position.samples)
        self.snapshot = Snapshot()
        self._max_steps, self._fewer = run.methods.state.max_steps, 0
        self._spoilt: tuple[Any, ...] = ()
        self.load_state_dict(run.restored_recovery)
        run.recovery, run.updates.guard = self, self
        self.snapshot.take(run)

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
            if has_output or step - (self.snapshot.step or 0) >= run.methods.args.snapshot_steps:
                self.check()
                self.snapshot.take(run)

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
                raise SpoiltError(number, samples, why)
            self._losses.append(loss)

    def _why_spoilt(self, loss: float, norm: float) -> str | None:
        if not (math.isfinite(loss) and math.isfinite(norm)):
            return f"its loss is {loss:g}, its gradient norm {norm:g}"
        if len(self._losses) < LEAST:
            return None
        limit = spike_limit(self._losses, self._run.methods.args.spike_deviations)
        return f"its loss is {loss:g}, above {limit:g}" if loss > limit else None

    def takes(self, error: Exception) -> bool:
        """Whether the error is that of a step which spoils the run."""
        self._spoilt = error.args  # not the error, whose frames hold tensors
        return isinstance(error, SpoiltError)

    def go_back(self) -> None:
        """Go back to the snapshot, and leave out the batches of the step from now on.

        Raises:
            FloatingPointError: that was done `max_rewinds` times already.
        """
        number, samples, why = self._spoilt
        run, most, size = self._run, self._run.methods.args.max_rewinds, self._run.found_size
        left_out, (epoch, first, end) = [*self._left_out, samples], samples
        what = f"step {number + 1} (samples {first} to {end - 1} in the order of epoch {epoch}): {why}"
        if len(left_out) > most:
            raise FloatingPointError(
                f"{what}; batches of {most} steps were left out before (max_rewinds={most}). If it is not the data, "
                "lower learning_rate or max_grad_norm; or raise max_rewinds or spike_deviations"
            )
        if run.watch.has_other_parameters(run.methods.model):
            raise FloatingPointError(f"{what}; the model was given other parameters since, so the run cannot go back")
        self.snapshot.restore(run)
        if size is not None:  # memory may have run out since the snapshot
            run.found_size = run.methods.state.train_batch_size = size
        run.methods.random_state.reapply()  # last: nothing may have drawn since
        self._left_out, self._steps = left_out, []
        if not run.plan.ends_by_steps:
            self._fewer += 1
            run.methods.state.max_steps = self._max_steps - self._fewer  # so that what is due at the end is done there
        logger.warning("%s; going on from step %d without these samples", what, self.snapshot.step)


def _copy(value: Any) -> Any:
    """Copy what a step may change in place; the rest is shared."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: _copy(item) for key, item in value.items()}
    return [_copy(item) for item in value] if isinstance(value, list) else value


class ForwardState:
    """Random number generators and a model's buffers, as of the last call of `record`.

    No sync. A buffer that never changes is copied once; another is copied again if it was written to since. Running
    statistics are copied every time, because torch's writes to them are not detectable.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._model, self._device = model, device
        self._generators: dict[str, Any] = {}
        self._copies: dict[int, _Copy] = {}

    def record(self) -> None:
        """Save the current state."""
        self._generators, before, self._copies = RandomState(self._device).state_dict(), self._copies, {}
        for module in self._model.modules():
            for buffer in (each for each in module._buffers.values() if each is not None):
                known = before.get(id(buffer))
                if known is None or known.buffer is not buffer or known.may_differ():
                    known = _Copy(buffer, buffer._version, buffer.detach().clone(), hasattr(module, "running_mean"))
                self._copies[id(buffer)] = known

    def restore(self) -> None:
        """Restore generators and buffers to the saved state."""
        RandomState(self._device).load_state_dict(self._generators)
        with torch.no_grad():
            for known in filter(_Copy.may_differ, self._copies.values()):
                known.buffer.copy_(known.copy)


class _Copy(NamedTuple):
    buffer: torch.Tensor
    version: int
    copy: torch.Tensor
    is_silent: bool

    def may_differ(self) -> bool:
        return self.is_silent or self.buffer._version != self.version
