"""Show training, evaluation and prediction on the console.

`ProgressCallback` draws bars and figures on a terminal, a table and a curve in a notebook, and writes one plain line
for each log elsewhere. `PrinterCallback` prints each log entry as a dict and shows no progress.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

from tr_log import formatting
from tr_log.formatting import to_scalar
from tr_log.layout import Display, Figure
from tr_log.phases import CHECKPOINT, COMPUTE, DATA, EVALUATION, EXCHANGE, PROFILE, START, active_clock
from tr_log.progress import Bar, DrawnBar, RateMeter, length, open_bar, open_display
from tr_log.terminal import write_line
from tr_log.tracker import EveryEvent

NOT_PRINTED = ("total_flos",)


class PrinterCallback(EveryEvent):
    """A trainer callback without a progress display: the main process prints each log entry as a dict.

    Args:
        stream: where to print; None is `sys.stdout` at the time of each entry.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream

    def on_log(self, args: Any, state: Any, control: Any, logs: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        """Print `logs` on one line, without changing it."""
        if logs and state.is_world_process_zero:
            shown = {name: to_scalar(logs[name]) for name in logs if name not in NOT_PRINTED}
            stream = self._stream if self._stream is not None else sys.stdout
            write_line(stream, " ".join(str(shown).splitlines()))


TRAINING, UPLOADING = "training", "uploading"
NAMES = {
    START: "loading",
    DATA: TRAINING,
    COMPUTE: TRAINING,
    EXCHANGE: TRAINING,
    EVALUATION: "evaluating",
    CHECKPOINT: "saving",
    PROFILE: "writing a profile",
    "": TRAINING,
}
"""What the bar calls a phase."""
ON_THE_BAR = {"loss": "loss ", "grad_norm": "grad norm ", "learning_rate": "lr "}


class ProgressCallback(EveryEvent):
    """A trainer callback that shows progress on the main process, unless `disable_tqdm` is set.

    A terminal shows a bar for the training, and another during an evaluation or prediction, with figures below and log
    lines above them. A notebook shows them with a table of the logs and a curve of the loss. A file, a pipe or a build
    server gets one line for each log instead:
    `step 120/500 (24%)  loss 0.4321  grad_norm 1.2  lr 4.1e-05  epoch 0.48  3.2 it/s  eta 2:03`.
    The speed is measured since the last line, without evaluations. The time left counts everything.

    Args:
        stream: where to show it; None is the notebook, if there is one, else `sys.stderr` when it is needed.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._given_stream = stream
        self._pace: RateMeter | None = None
        self._display: Display | None = None
        self._training: DrawnBar | None = None
        self._passing: Bar | None = None  # an evaluation's or prediction's
        self._latest: dict[str, Any] = {}  # of the logs
        self._args: Any = None
        self._state: Any = None
        self._summary: Mapping[str, Any] = {}
        self._shown: frozenset[str] = frozenset()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write the length of the training, and open the bar."""
        self._close()
        if not _is_shown(args, state):
            return
        self._display = open_display(self._given_stream)
        self._pace = RateMeter(state.global_step, state.max_steps)
        self._summary, self._latest, self._args, self._state = {}, {}, args, state
        self._write(_beginning(state))
        if self._display is not None:
            self._training = DrawnBar(self._display, "starting", self._pace.total, completed=state.global_step)
            self._training.figures = self._figures
            if (clock := active_clock()) is not None:
                clock.on_doing = self._show

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Advance the bar, if there is one."""
        if self._training is not None:
            self._args, self._state, self._training.name = args, state, TRAINING
            self._training.move_to(state.global_step)

    def on_prediction_step(
        self, args: Any, state: Any, control: Any, eval_dataloader: Any = None, **kwargs: Any
    ) -> None:
        """Advance the bar of an evaluation or prediction; the first batch opens it."""
        if self._passing is None:
            if not _is_shown(args, state):
                return
            self._find_display()
            if self._training is not None:
                self._training.name = TRAINING
            self._passing = open_bar(self._given_stream, NAMES[EVALUATION], length(eval_dataloader))
        self._passing.advance()

    def on_log(self, args: Any, state: Any, control: Any, logs: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        """Write the entry on one line; the last entry of a training waits for its end."""
        if not logs or not _is_shown(args, state):
            return
        if "train_runtime" in logs and "loss" not in logs:  # a log has it too where tokens are counted
            self._summary = dict(logs)
        elif "loss" in logs or _runtime_s(logs) is None:
            self._write_training(state, logs)
        else:
            self._close_passing()
            self._write_evaluation(state, logs)

    def on_evaluate(
        self, args: Any, state: Any, control: Any, metrics: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> None:
        """Close the evaluation's bar, and write its metrics if they were not logged."""
        self._close_passing()
        if metrics and _is_shown(args, state) and not self._shown.issuperset(metrics):
            self._write_evaluation(state, metrics)
        self._shown = frozenset()
        self._leave()

    def on_predict(
        self, args: Any, state: Any, control: Any, metrics: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> None:
        """Close the prediction's bar and write its metrics."""
        self._close_passing()
        if metrics and _is_shown(args, state):
            self._write("  ".join(["prediction", *formatting.evaluation(metrics)]))
        self._leave()

    def on_train_end(
        self, args: Any, state: Any, control: Any, error: BaseException | None = None, **kwargs: Any
    ) -> None:
        """Close all bars, and write how the training ended."""
        pace, self._pace = self._pace, None
        self._close()
        if pace is not None:
            self._write(_ending(state, pace, self._summary, error))
        self._leave()

    def _write_training(self, state: Any, logs: Mapping[str, Any]) -> None:
        total = self._pace.total if self._pace is not None else None
        pieces = [f"step {formatting.position(state.global_step, total)}", *formatting.entry(logs)]
        self._latest.update(logs)
        if self._training is None and self._pace is not None:
            rate, eta_s = self._pace.rate(state.global_step), self._pace.eta_s(state.global_step)
            pieces += [formatting.speed(rate)] if rate else []
            pieces += [f"eta {formatting.duration(eta_s)}"] if eta_s is not None else []
        self._log(pieces, state.global_step, logs)

    def _write_evaluation(self, state: Any, logs: Mapping[str, Any]) -> None:
        if self._pace is not None:
            self._pace.exclude(_runtime_s(logs) or 0.0)
        total = self._pace.total if self._pace is not None else None
        where = [f"step {formatting.position(state.global_step, total)}"] if state.global_step else []
        is_best = self._pace is not None and _is_new_best(self._args, state, logs)
        pieces = [*where, "evaluation", *formatting.evaluation(logs), *["new best"] * is_best]
        self._log(pieces, state.global_step, logs, "bold green" if is_best else "bold")
        self._shown = frozenset(logs)

    def _log(self, pieces: Sequence[str], step: int, entry: Mapping[str, Any], style: str = "") -> None:
        self._find_display()
        if self._display is not None:
            self._display.log(pieces, step, entry, style)
        else:
            self._write("  ".join(pieces))

    def _write(self, line: str) -> None:
        if self._display is not None:
            self._display.write(line)
        else:
            write_line(self._given_stream if self._given_stream is not None else sys.stderr, line)

    def _find_display(self) -> None:
        # Kept until the training or the evaluation ends: in a notebook, all of it is one output.
        if self._display is None and self._pace is None:
            self._display = open_display(self._given_stream)

    def _leave(self) -> None:
        if self._pace is None:
            self._display = None

    def _figures(self) -> list[Figure]:
        figures = [
            Figure(before, formatting.value(self._latest[n])) for n, before in ON_THE_BAR.items() if n in self._latest
        ]
        args, state, clock = self._args, self._state, active_clock()
        figures += _position(state)
        if state.best_metric is not None:
            name = getattr(args, "metric_for_best_model", None) or "metric"
            figures.append(Figure(f"best {name} ", formatting.value(state.best_metric)))
        return figures + (_rates(clock.rates) if clock is not None else [])

    def _show(self, doing: str) -> None:
        """Show what is under way; after the training, what a callback waits for has a bar of its own."""
        if self._training is not None:
            self._training.rename(NAMES.get(doing, doing) if self._passing is None else TRAINING)
        elif doing == UPLOADING:
            self._close_passing()
            self._passing = open_bar(self._given_stream, UPLOADING, None)
        else:
            self._close_passing()

    def _close_passing(self) -> None:
        if self._passing is not None:
            self._passing.close()
            self._passing = None

    def _close(self) -> None:
        self._close_passing()
        if self._training is not None:
            self._training.close()
            self._training = None


def _position(state: Any) -> list[Figure]:
    epoch, whole = getattr(state, "epoch", None), state.num_train_epochs
    if epoch is None:
        return []
    return [Figure("epoch ", f"{epoch:.2f}" + (f"/{formatting.value(whole)}" if 0 < whole < sys.maxsize else ""))]


def _rates(rates: Mapping[str, float]) -> list[Figure]:
    figures = []
    if "samples_per_second" in rates:
        figures.append(Figure("", formatting.count(rates["samples_per_second"]), " samples/s"))
    if "tokens_per_second" in rates:
        figures.append(Figure("", formatting.count(rates["tokens_per_second"]), " tokens/s"))
    if "mfu" in rates:
        figures.append(Figure("MFU ", f"{100 * rates['mfu']:.1f}%"))
    if "memory_bytes" in rates:
        figures.append(Figure("memory ", formatting.size(rates["memory_bytes"])))
    if "memory_peak_bytes" in rates:
        figures.append(Figure("peak ", formatting.size(rates["memory_peak_bytes"])))
    return figures


def _is_shown(args: Any, state: Any) -> bool:
    return state.is_world_process_zero and not args.disable_tqdm


def _runtime_s(logs: Mapping[str, Any]) -> float | None:
    # Only an evaluation's entry has this name, with any prefix.
    return next((float(logs[name]) for name in logs if name.endswith("_runtime")), None)


def _is_new_best(args: Any, state: Any, logs: Mapping[str, Any]) -> bool:
    """Whether an evaluation is better than the best one before it; the Trainer notes it after it is logged."""
    name = getattr(args, "metric_for_best_model", None)
    value = logs.get(f"eval_{name.removeprefix('eval_')}") if name else None
    if not isinstance(value, int | float) or value != value:
        return False
    if state.best_metric is None:
        return True
    return value > state.best_metric if args.greater_is_better else value < state.best_metric


def _beginning(state: Any) -> str:
    steps = _count(state.max_steps, "step") if state.max_steps > 0 else "an open number of steps"
    if state.global_step:
        return f"training goes on at step {state.global_step} of {steps}"
    if state.num_train_epochs >= sys.maxsize:  # a stream without a length
        return f"training for {steps}"
    return f"training for {steps}, {_count(state.num_train_epochs, 'epoch')}"


def _count(number: float, unit: str) -> str:
    return f"{formatting.value(number)} {unit}" + ("" if number == 1 else "s")


def _ending(state: Any, pace: RateMeter, summary: Mapping[str, Any], error: BaseException | None) -> str:
    step, took = state.global_step, formatting.duration(pace.elapsed_s)
    if error is None and (pace.total is None or step >= pace.total):
        pieces = [f"training finished  {_count(step, 'step')} in {took}"]
    else:
        cause = f" by {type(error).__name__}" if error is not None else ""
        pieces = [f"training stopped{cause} at step {formatting.position(step, pace.total)} after {took}"]
    rate = pace.mean_rate(step)
    pieces += [formatting.speed(rate)] if rate else []
    if "train_samples_per_second" in summary:
        pieces.append(f"{formatting.value(summary['train_samples_per_second'])} samples/s")
    if "train_loss" in summary:
        pieces.append(f"train_loss {formatting.value(summary['train_loss'])}")
    return "  ".join(pieces)
