"""Accumulate what happened since the last log, and count the input tokens of a run."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypedDict

import torch
from torch import nn

from tr_core.data.sampler import MicroBatch
from tr_core.data.virtual_shards import on_grid
from tr_core.metric_means import MetricWindow, Sums, accumulator_dtype, read_scalars, weighted_means
from tr_core.model_io import main_input_name, to_device
from tr_core.protocols import Collectives
from tr_core.results import speed_metrics
from tr_core.state import TrainerState
from tr_core.throughput import Throughput
from tr_log import get_logger
from tr_log.phases import COMPUTE, PhaseClock, active_clock

logger = get_logger("tr_core.trainer")

# Steps whose loss and norm are checked together: one by one, a check costs a step four operations on scalars.
CHECK_EVERY = 64


class RankWindow(TypedDict):
    """Hold the window of one rank as plain values, for exchange between ranks and for checkpoints.

    Attributes:
        grad_norm: norm of the last step's gradients before clipping; None before the first step.
        nonfinite: steps whose loss or gradient norm was not finite.
        skipped: updates that were skipped for this reason.
        place: in a checkpoint, the data's own state of its position in the epoch; None if it has none.
    """

    loss: float
    grad_norm: float | None
    nonfinite: int
    skipped: int
    metrics: Sums
    flops: float
    tokens: int
    place: Any


class ClosedWindow(NamedTuple):
    """Hold the window of all ranks.

    Attributes:
        loss: sum of the steps' losses, as the mean over ranks.
        nonfinite: steps whose loss or gradient norm was not finite, on the rank that had most.
        metrics: weighted means over steps and ranks.
    """

    loss: float
    grad_norm: float | None
    nonfinite: int
    skipped: int
    metrics: dict[str, float]


class LogWindow:
    """Accumulate this rank's window since the last log; losses, norms and counts stay on the device until read.

    Args:
        strategy: this process among those with other samples.
        tokens: counts them.
        share: of a virtual shard's loss in the mean over ranks: their number by that of shards. With it sums do not
            depend on the order of what is added. None without.

    Attributes:
        counters: called with every micro-batch; they count tokens and floating-point operations.
        of_strategy: returns what the strategy measured since its last call.
        filters_nonfinite: whether the log omits losses that are not finite.
        step: completed steps of the run when the current step began.
        num_nonfinite: steps whose loss or norm was not finite, a scalar tensor.
        left_out: whether `on_nonfinite` left out the current update, a scalar tensor; None if it leaves out none.
        num_skipped: updates that were skipped for this reason, a scalar tensor.
        unchecked: loss and norm of the last applied steps, which `num_nonfinite` does not count yet.
        flops: floating-point operations since they were last added to the state.
        of_all_ranks: the windows of all ranks at the last save.
        first_step: completed steps of the run when this call of `train` began.
        first_tokens: input tokens seen when this call of `train` began.
        start_s: `time.perf_counter()` when this call of `train` began.
        logged_loss: sum of the losses of the steps of this call that were logged.
        logged_skips: number of updates that were skipped in them.
    """

    def __init__(
        self, strategy: Collectives, tokens: TokenCounter | None = None, *, share: float | None = None
    ) -> None:
        self.tokens, self.means, self._share = tokens, MetricWindow(strategy, is_exact=share is not None), share
        self.counters: list[Callable[[MicroBatch], None]] = []
        self.of_strategy: Callable[[], Mapping[str, torch.Tensor]] = dict
        self.filters_nonfinite = False
        self._zero = torch.zeros((), dtype=torch.float32 if share is None else torch.float64, device=strategy.device)
        self.step_loss = self.loss_sum = self._loss_before_step = self._zero
        self.num_nonfinite = self.num_skipped = torch.zeros_like(self._zero, dtype=torch.int64)
        self.unchecked: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.left_out: torch.Tensor | None = None
        self.grad_norm: torch.Tensor | None = None
        self.learning_rate, self.flops = 0.0, 0.0
        self.step = self.last_logged_step = self.first_step = self.first_tokens = 0
        self.of_all_ranks: list[RankWindow] = []
        self.start_s = time.perf_counter()
        self.logged_loss, self.logged_skips, self._overflows = 0.0, 0, 0
        self.clock = active_clock() or PhaseClock(COMPUTE)
        self.throughput = Throughput(self.clock)

    def begin(self, num_tokens: int) -> None:
        """Begin the first step of this call of `train`, with the input tokens seen so far in the whole run."""
        self.clock.switch(COMPUTE)
        self.throughput.begin(num_tokens)

    def begin_step(self, step: int) -> None:
        """Begin a step after `step` completed ones."""
        if time.perf_counter() >= self.clock.due_s:
            self.clock.on_due(step)
        self.step, self.step_loss, self._loss_before_step = step, self._zero, self.loss_sum

    def add(self, loss: torch.Tensor, batch: MicroBatch) -> None:
        """Add a micro-batch: its share of the step's loss, a scalar, its tokens and its operations."""
        if loss.device != self._zero.device:  # as of a model that is divided over devices, or a constant of the host
            loss = to_device(loss, self._zero.device)
        if self._share is not None:
            loss = on_grid(loss) * self._share  # exact: both are whole numbers, divided by powers of two
        # The first loss of a step is its sum, unless its type is another one, which would lose precision.
        is_first = self.step_loss is self._zero and loss.dtype is self._zero.dtype
        self.step_loss = loss if is_first else self.step_loss + loss
        if self.filters_nonfinite:  # the mean of the window so far replaces a loss that is not finite
            loss = torch.where(torch.isfinite(loss), loss, self.loss_sum / (1 + self.step - self.last_logged_step))
        self.loss_sum = self.loss_sum + loss  # not in place: a step may be repeated or skipped
        if batch.total is None:
            self.throughput.count_own(batch)
        else:  # without a call: a step has few
            self.throughput.samples += batch.total
        for count in self.counters:
            count(batch)

    def end_step(self, norm: torch.Tensor, learning_rate: float, *, applied: bool) -> None:
        """Record the end of the current step: its gradient norm and rate, and whether an overflow skipped it."""
        self.learning_rate = learning_rate + 0.0  # a copy of a tensor, which a schedule would change in place
        if applied:
            self.unchecked.append((self.step_loss, norm))
            if len(self.unchecked) >= CHECK_EVERY:
                self.count_nonfinite()
        else:
            self._overflows += 1

    def discard_step(self, skip: torch.Tensor) -> None:
        """Remove the current step from the window if a flag on the device is set."""
        self.left_out = skip
        self.loss_sum = torch.where(skip, self._loss_before_step, self.loss_sum)
        self.num_skipped = self.num_skipped + skip
        self.means.flush(skip)

    def count_nonfinite(self) -> None:
        """Count the steps in `unchecked` whose loss or norm is not finite, and empty it; nothing is read."""
        if self.unchecked:
            losses, norms = zip(*self.unchecked, strict=True)
            self.num_nonfinite = self.num_nonfinite + is_nonfinite(torch.stack(losses), torch.stack(norms)).sum()
            self.unchecked = []

    def count_flops(self, operations: float) -> None:
        """Add floating-point operations of a micro-batch."""
        self.flops += operations

    def read(self) -> RankWindow:
        """Read this rank's window; reset the counts of operations and tokens, and keep the rest. Sync."""
        self.count_nonfinite()
        for name, value in self.of_strategy().items():
            self.means.add(name, value)
        norm = [] if self.grad_norm is None else [self.grad_norm]
        loss, nonfinite, skipped, *norms = read_scalars([self.loss_sum, self.num_nonfinite, self.num_skipped, *norm])
        flops, self.flops = self.flops, 0.0
        return {
            "loss": loss,
            "grad_norm": norms[0] if norms else None,
            "nonfinite": int(nonfinite),
            "skipped": int(skipped),
            "metrics": self.means.read(),
            "flops": flops,
            "tokens": 0 if self.tokens is None else self.tokens.take(),
            "place": None,
        }

    def close(self, windows: Sequence[RankWindow]) -> ClosedWindow:
        """Merge the windows that the ranks read, return the result, and begin a new window."""
        closed = ClosedWindow(
            loss=sum(window["loss"] for window in windows) / len(windows),
            grad_norm=windows[0]["grad_norm"],
            nonfinite=max(window["nonfinite"] for window in windows),
            skipped=windows[0]["skipped"],
            metrics=weighted_means([window["metrics"] for window in windows]),
        )
        self.logged_loss += closed.loss
        self.logged_skips += closed.skipped
        applied = max(closed.nonfinite - closed.skipped, 0)
        counts = {"skipped": closed.skipped, "overflowed": self._overflows, "nonfinite": applied}
        self.clock.updates = {name: number for name, number in counts.items() if number}
        self._overflows = 0
        # Not subtracted from themselves: NaN - NaN stays NaN.
        self.loss_sum, self.num_nonfinite = self._zero, torch.zeros_like(self.num_nonfinite)
        self.num_skipped = torch.zeros_like(self.num_skipped)
        self.means.clear()
        return closed

    def entry(self, closed: ClosedWindow, steps: int, num_tokens: int) -> dict[str, Any]:
        """Return the log entry of a closed window."""
        applied = steps - closed.skipped
        logs: dict[str, Any] = {"loss": closed.loss / applied if applied else math.nan}
        if closed.grad_norm is not None:
            logs["grad_norm"] = closed.grad_norm
        logs["learning_rate"] = float(self.learning_rate)  # sync: once a log, if an optimizer has tensors as rates
        if self.means.holds_back:
            logs["skipped_steps"] = closed.skipped
        logs |= closed.metrics
        if self.tokens is not None:
            logs |= speed_metrics("train", self.start_s, num_tokens=num_tokens - self.first_tokens)
        return logs

    def mean_loss(self, steps: int) -> float:
        """Return the mean loss of this call's applied and logged steps, out of `steps`."""
        applied = steps - self.logged_skips
        return self.logged_loss / applied if applied else math.nan

    def load(self, windows: Sequence[RankWindow], rank: int, world_size: int) -> None:
        """Restore a saved window of all ranks; another number of ranks shares it evenly."""
        own = share_window(windows, rank, world_size)
        norm = own["grad_norm"]
        self.grad_norm = None if norm is None else self._as_saved(norm)
        self.loss_sum = self._as_saved(own["loss"])
        self.num_nonfinite = torch.full_like(self.num_nonfinite, own["nonfinite"])
        self.num_skipped = torch.full_like(self.num_skipped, own["skipped"])
        self.means.load(own["metrics"])
        # Steps of an earlier call count for the next log, but not for the mean loss of this call.
        self.logged_loss = -sum(window["loss"] for window in windows) / len(windows)
        self.logged_skips = -own["skipped"]

    def _as_saved(self, number: float) -> torch.Tensor:
        is_single = torch.full((), number, dtype=self._zero.dtype).item() == number
        return torch.full_like(self._zero, number, dtype=None if is_single else accumulator_dtype(self._zero.device))


def is_nonfinite(loss: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
    """Return where either of two tensors of one shape is NaN or infinite; the result stays on the device."""
    return torch.ne(loss - loss, norm - norm)  # x - x is 0 if x is finite, else NaN, which equals nothing


def share_window(windows: Sequence[RankWindow], rank: int, world_size: int) -> RankWindow:
    """Return a rank's part of a saved window: its own, or a share if the number of ranks changed.

    Sums over the ranks stay the same. The state already holds operations and tokens.
    """
    if len(windows) == world_size:
        return windows[rank]
    totals: dict[str, list[float]] = {}
    for window in windows:
        for name, pair in window["metrics"].items():
            so_far = totals.setdefault(name, [0.0, 0.0])
            totals[name] = [before + number for before, number in zip(so_far, pair, strict=True)]
    return {
        "loss": sum(window["loss"] for window in windows) / len(windows),
        "grad_norm": windows[0]["grad_norm"],
        "nonfinite": max(window["nonfinite"] for window in windows),
        "skipped": windows[0]["skipped"],
        "metrics": {name: (total / world_size, weight / world_size) for name, (total, weight) in totals.items()},
        "flops": 0.0,
        "tokens": 0,
        "place": None,
    }


def store_counts(state: TrainerState, windows: Sequence[RankWindow]) -> None:
    """Add the floating-point operations and input tokens of all ranks to the state."""
    state.total_flos += sum(window["flops"] for window in windows)
    state.num_input_tokens_seen += sum(window["tokens"] for window in windows)


def warn_of_nonfinite(window: ClosedWindow, steps: int, last_step: int, on_nonfinite: str) -> None:
    """Warn once a window of steps that were not finite, or that were skipped."""
    where = f"of the {steps} steps up to step {last_step}"
    if window.skipped:
        logger.warning(
            "%d %s were not applied (on_nonfinite='skip'): their loss or gradient norm was NaN or infinite",
            window.skipped,
            where,
        )
    elif window.nonfinite and on_nonfinite == "log":
        logger.error(
            "%d %s had a loss or a gradient norm that is NaN or infinite, and were applied; on_nonfinite='skip' leaves "
            "such updates out, on_nonfinite='raise' stops the run before they are saved",
            window.nonfinite,
            where,
        )
    elif not math.isfinite(window.loss) and on_nonfinite == "log":
        logger.error("some %s had a loss that is NaN or infinite; float16 left their updates out", where)


class TokenCounter:
    """Count the elements of the main input of this rank's micro-batches.

    Batches come from the loader with host tensors, so nothing is read from a device. If a collator built them on a
    device, the count stays there until `take`.
    """

    def __init__(self, input_name: str, *, only_real: bool = False, padding: int | None = None) -> None:
        self._input_name, self._only_real, self._padding = input_name, only_real, padding
        self._on_host, self._on_device = 0, None

    def count(self, batch: MicroBatch) -> None:
        """Add a micro-batch. A filler batch, with which this rank only takes part, has no tokens of its own.

        Raises:
            ValueError: the tokens of the batch, or its padding, cannot be found.
        """
        if batch.weight == 0.0:
            return
        tokens = self._main_input(batch.inputs)
        if not self._only_real:
            self._on_host += tokens.numel()
            return
        number = self._is_real(batch.inputs, tokens).sum()
        if number.device.type == "cpu":
            self._on_host += int(number)
        else:
            self._on_device = number if self._on_device is None else self._on_device + number

    def take(self) -> int:
        """Return the tokens counted since the last call."""
        on_device = 0 if self._on_device is None else int(self._on_device)  # sync: once a log, if at all
        tokens, self._on_host, self._on_device = self._on_host + on_device, 0, None
        return tokens

    def _main_input(self, inputs: Any) -> torch.Tensor:
        tokens = inputs.get(self._input_name) if isinstance(inputs, Mapping) else None
        if isinstance(tokens, torch.Tensor):
            return tokens
        given = sorted(map(str, inputs)) if isinstance(inputs, Mapping) else f"a {type(inputs).__name__}"
        raise ValueError(
            f"include_num_input_tokens_seen counts the elements of {self._input_name!r}, but a batch is {given}; set "
            "model.main_input_name to the key of the model's main input, or include_num_input_tokens_seen='no'"
        )

    def _is_real(self, inputs: Mapping[str, Any], tokens: torch.Tensor) -> torch.Tensor:
        mask = inputs.get("attention_mask")
        if isinstance(mask, torch.Tensor) and mask.dim() == 2:
            return mask != 0
        if self._padding is not None:
            return tokens != self._padding
        raise ValueError(
            "include_num_input_tokens_seen='non_padding' cannot tell what is padding: batches have no attention_mask "
            "of shape (samples, tokens), and there is no processing_class with a pad_token_id; add one of them, or "
            "count 'all'"
        )


def build_token_counter(mode: str, model: nn.Module, processor: Any) -> TokenCounter | None:
    """Return the token counter that `include_num_input_tokens_seen` selects; None for `no`."""
    if mode == "no":
        return None
    padding = getattr(processor, "pad_token_id", None)
    return TokenCounter(main_input_name(model), only_real=mode == "non_padding", padding=padding)
