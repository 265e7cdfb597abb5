"""Log what happened since the last log, and count the input tokens of a run.

Values are read from the device in one transfer a log. Ranks exchange them once a log.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict

import torch

from tr_core.changes import check_same_on_all_ranks, values_of_all_ranks
from tr_core.data.sampler import MicroBatch
from tr_core.metric_means import Sums, read_scalars, weighted_means
from tr_core.model_io import main_input_name
from tr_core.results import speed_metrics
from tr_core.state import TrainerState

if TYPE_CHECKING:
    from tr_core.run import Run
    from tr_core.trainer.trainer import Trainer


class RankWindow(TypedDict):
    """What one rank holds since the last log, as plain values: what ranks exchange, and a checkpoint keeps.

    Attributes:
        loss: sum of the steps' losses.
        grad_norm: norm of the last step's gradients before clipping; None before the first step.
        nonfinite: steps whose loss or gradient norm was not finite.
        skipped: updates that were left out for it.
        metrics: what was logged with `log_metric`.
        flops: floating-point operations.
        tokens: input tokens.
        place: where the data is in its pass, as the data itself says it, in a checkpoint; None where it does not.
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
    """A window of all ranks.

    Attributes:
        loss: sum of the steps' losses, as the mean over ranks.
        grad_norm: norm of the last step's gradients before clipping.
        nonfinite: steps whose loss or gradient norm was not finite, on the rank that had most.
        skipped: updates that were left out for it.
        metrics: weighted means over steps and ranks.
    """

    loss: float
    grad_norm: float | None
    nonfinite: int
    skipped: int
    metrics: dict[str, float]


def read_rank_window(run: Run) -> RankWindow:
    """Read this rank's open window; the counts of operations and tokens begin anew, all else stays."""
    run.count_nonfinite()
    norm = [] if run.grad_norm is None else [run.grad_norm]
    loss, nonfinite, skipped, *norms = read_scalars([run.loss_sum, run.num_nonfinite, run.num_skipped, *norm])
    flops, run.flops = run.flops, 0.0
    return {
        "loss": loss,
        "grad_norm": norms[0] if norms else None,
        "nonfinite": int(nonfinite),
        "skipped": int(skipped),
        "metrics": run.metrics.read(),
        "flops": flops,
        "tokens": 0 if run.tokens is None else run.tokens.take(),
        "place": None,
    }


def share_window(windows: Sequence[RankWindow], rank: int, world_size: int) -> RankWindow:
    """Return the part of a saved window that a rank goes on with: its own, or of another number of ranks a share.

    Sums over the ranks stay what they were; operations and tokens are in the state already.
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


def store_tokens(trainer: Trainer, run: Run) -> None:
    """Add the input tokens of all ranks to the state, where they are counted, for an entry between two logs."""
    if run.tokens is not None:
        trainer.state.num_input_tokens_seen += sum(trainer.strategy.gather_objects(run.tokens.take()))


def close_window(trainer: Trainer, run: Run) -> ClosedWindow:
    """Read the window of all ranks and begin a new one.

    Raises:
        FloatingPointError: something was not finite, and `on_nonfinite` is `raise`.
        ValueError: what has to be the same on all ranks was changed on some of them.
    """
    if run.guard is not None:
        run.guard.check()
    shared = values_of_all_ranks(trainer.args, run.optimizer) if trainer.strategy.world_size > 1 else {}
    gathered = trainer.strategy.gather_objects((read_rank_window(run), shared))
    check_same_on_all_ranks([values for _, values in gathered])
    windows = [window for window, _ in gathered]
    store_counts(trainer.state, windows)
    closed = ClosedWindow(
        loss=sum(window["loss"] for window in windows) / len(windows),
        grad_norm=windows[0]["grad_norm"],
        nonfinite=max(window["nonfinite"] for window in windows),
        skipped=windows[0]["skipped"],
        metrics=weighted_means([window["metrics"] for window in windows]),
    )
    run.begin_window(closed.loss, closed.skipped)
    return closed


def log_window(trainer: Trainer, run: Run) -> None:
    """Log the mean loss of the steps since the last log, the last gradient norm and learning rate, and metrics."""
    steps = trainer.state.global_step - run.last_logged_step
    window = close_window(trainer, run)
    run.last_logged_step = trainer.state.global_step
    applied = steps - window.skipped
    logs: dict[str, Any] = {"loss": window.loss / applied if applied else math.nan}
    if window.grad_norm is not None:
        logs["grad_norm"] = window.grad_norm
    logs["learning_rate"] = run.learning_rate
    if trainer.args.on_nonfinite == "skip":
        logs["skipped_steps"] = window.skipped
    logs |= window.metrics
    if run.tokens is not None:
        tokens = trainer.state.num_input_tokens_seen - run.first_tokens
        logs |= speed_metrics("train", run.start_s, num_tokens=tokens)
    if trainer.is_world_process_zero():
        _warn_of_nonfinite(trainer, window, steps)
    trainer.log(logs)
    run.agree_on_flags()


def _warn_of_nonfinite(trainer: Trainer, window: ClosedWindow, steps: int) -> None:
    """Say, once a window, that a run is breaking, or what was left out of it."""
    where = f"of the {steps} steps up to step {trainer.state.global_step}"
    if window.skipped:
        trainer.logger.warning(
            "%d %s were not applied (on_nonfinite='skip'): their loss or gradient norm was NaN or infinite",
            window.skipped,
            where,
        )
    elif window.nonfinite and trainer.args.on_nonfinite == "log":
        trainer.logger.error(
            "%d %s had a loss or a gradient norm that is NaN or infinite, and were applied; on_nonfinite='skip' leaves "
            "such updates out, on_nonfinite='raise' stops the run before they are saved",
            window.nonfinite,
            where,
        )
    elif not math.isfinite(window.loss) and trainer.args.on_nonfinite == "log":
        trainer.logger.error("some %s had a loss that is NaN or infinite; float16 left their updates out", where)


class TokenCounter:
    """Count the elements of the main input of this rank's micro-batches.

    Batches come from the loader with host tensors, so nothing is read from a device; where a collator made them on one,
    the count stays there until `take`.

    Args:
        input_name: key of the main input in a batch.
        only_real: leave out padding, by the batch's `attention_mask` if it has one, else by `padding`.
        padding: the token that fills up, None if there is none.
    """

    def __init__(self, input_name: str, *, only_real: bool = False, padding: int | None = None) -> None:
        self._input_name, self._only_real, self._padding = input_name, only_real, padding
        self._on_host, self._on_device = 0, None

    def count(self, batch: MicroBatch) -> None:
        """Add a micro-batch; one that only fills up, so that this rank takes part, has no tokens of its own.

        Raises:
            ValueError: the batch does not say what its tokens are, or which of them are padding.
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


def build_token_counter(trainer: Trainer) -> TokenCounter | None:
    """Return what `include_num_input_tokens_seen` asks for; None where it is `no`."""
    mode = trainer.args.include_num_input_tokens_seen
    if mode == "no":
        return None
    processor = trainer.processing_class
    padding = getattr(processor, "pad_token_id", None)
    return TokenCounter(main_input_name(trainer.model), only_real=mode == "non_padding", padding=padding)
