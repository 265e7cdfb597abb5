"""Summarise a training at its end: duration, speed, best result and files."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tr_log import formatting
from tr_log.loggers import get_logger
from tr_log.tracker import EveryEvent

logger = get_logger(__name__)

LOWER_IS_BETTER = "eval_loss"


class RunReport(EveryEvent):
    """A trainer callback that logs a few lines at INFO on the main process when a training ends.

    It reads the trainer's `log_history`, so the report covers a resumed run from its beginning. Time and speed are
    those since the resume.
    """

    def __init__(self) -> None:
        self._started_s: float | None = None
        self._first_step = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Record the start time."""
        self._started_s = time.perf_counter()
        self._first_step = state.global_step

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Log the report."""
        if self._started_s is None or not state.is_world_process_zero:
            return
        seconds = time.perf_counter() - self._started_s
        self._started_s = None
        rows = [("steps", _steps(state, self._first_step, seconds)), *_newest_of_each_kind(state)]
        rows += [("best", text) for text in _best(args, state)]
        rows += _places(args)
        width = max(len(name) for name, _ in rows)
        logger.info("run report\n%s", "\n".join(f"  {name:<{width}}  {text}" for name, text in rows))


def _steps(state: Any, first: int, seconds: float) -> str:
    total = None if state.global_step == state.max_steps else state.max_steps
    text = f"{formatting.position(state.global_step, total)} in {formatting.duration(seconds)}"
    done = state.global_step - first
    pieces = [f"from step {first}"] if first else []
    if done > 0 and seconds > 0:
        pieces.append(formatting.speed(done / seconds, "step"))
    summary = _newest(state.log_history, "train_samples_per_second")
    if summary is not None:
        pieces.append(f"{formatting.value(summary['train_samples_per_second'])} samples/s")
    return text + (f" ({', '.join(pieces)})" if pieces else "")


def _newest_of_each_kind(state: Any) -> Iterator[tuple[str, str]]:
    for row, name in (("training", "loss"), ("evaluation", LOWER_IS_BETTER)):
        newest = _newest(state.log_history, name)
        if newest is not None:
            shown = {n: newest[n] for n in newest if n == name or _is_metric(n)}
            yield row, f"{'  '.join(formatting.entry(shown))}  (step {newest['step']})"


def _best(args: Any, state: Any) -> Iterator[str]:
    if state.best_metric is not None:
        name = getattr(args, "metric_for_best_model", None) or LOWER_IS_BETTER
        where = f"  (step {state.best_global_step})" if state.best_global_step else ""
        yield f"eval_{name.removeprefix('eval_')} {formatting.value(state.best_metric)}{where}"
        return
    losses = [e for e in state.log_history if isinstance(e.get(LOWER_IS_BETTER), float)]
    if len(losses) > 1:
        best = min(losses, key=lambda entry: entry[LOWER_IS_BETTER])
        yield f"{LOWER_IS_BETTER} {formatting.value(best[LOWER_IS_BETTER])}  (step {best['step']})"


def _places(args: Any) -> Iterator[tuple[str, str]]:
    folder = Path(args.output_dir)
    metrics = folder / "metrics.jsonl"
    if metrics.exists():
        yield "metrics", str(metrics)
    numbers = (path.name.removeprefix("checkpoint-") for path in folder.glob("checkpoint-*"))
    steps = sorted(int(number) for number in numbers if number.isdecimal())
    if steps:
        earlier = f", {len(steps) - 1} earlier beside it" if len(steps) > 1 else ""
        yield "checkpoint", f"{folder / f'checkpoint-{steps[-1]}'}{earlier}"


def _newest(history: Iterable[Mapping[str, Any]], name: str) -> Mapping[str, Any] | None:
    return next((entry for entry in reversed(list(history)) if name in entry), None)


def _is_metric(name: str) -> bool:
    return name.startswith("eval_") and not name.endswith(formatting.TIMINGS)
