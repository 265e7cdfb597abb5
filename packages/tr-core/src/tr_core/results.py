"""Define what training, evaluation and prediction return, what `compute_metrics` gets, and how metrics are written."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tr_log.formatting import printable
from tr_log.line_file import write_whole


class TrainOutput(NamedTuple):
    """Hold what `train` returns.

    Attributes:
        global_step: completed optimizer steps of the run.
        training_loss: mean loss of the steps of this call.
        metrics: run time, speed, loss and floating-point operations.
    """

    global_step: int
    training_loss: float
    metrics: dict[str, float]


class PredictionOutput(NamedTuple):
    """Hold what `predict` returns.

    Attributes:
        predictions: arrays of shape `(samples, ...)`, in tuples or dicts as the model returns them.
        label_ids: arrays of the same kinds; None if the data has no labels.
        metrics: loss, metrics and speed.
    """

    predictions: Any
    label_ids: Any
    metrics: dict[str, float]


class EvalLoopOutput(NamedTuple):
    """Hold what `evaluation_loop` returns.

    Attributes:
        predictions: arrays of shape `(samples, ...)`; None with `prediction_loss_only`.
        label_ids: arrays of shape `(samples, ...)`; None with `prediction_loss_only`, or without labels.
        metrics: loss and metrics, with prefix.
        num_samples: samples evaluated, over all ranks.
    """

    predictions: Any
    label_ids: Any
    metrics: dict[str, float]
    num_samples: int


class EvalPrediction:
    """Hold what `compute_metrics` gets; unpacks as `(predictions, label_ids[, inputs][, losses])`.

    Attributes:
        predictions: arrays of shape `(samples, ...)`, sequences padded with -100. With `eval_use_gather_object`: lists
            of objects, one for each sample.
        label_ids: arrays or lists of the same kinds.
        inputs: the main input, if `include_for_metrics` requests it.
        losses: loss of each sample's batch, shape `(samples,)`, if `include_for_metrics` requests it.
    """

    def __init__(self, predictions: Any, label_ids: Any, inputs: Any = None, losses: Any = None) -> None:
        self.predictions, self.label_ids, self.inputs, self.losses = predictions, label_ids, inputs, losses
        self._items = (predictions, label_ids, *(extra for extra in (inputs, losses) if extra is not None))

    def __iter__(self) -> Iterator[Any]:
        return iter(self._items)

    def __getitem__(self, index: int) -> Any:
        """Return the `index`-th of the unpacked items."""
        return self._items[index]

    def __len__(self) -> int:
        return len(self._items)


def speed_metrics(
    split: str,
    start_s: float,
    num_samples: float | None = None,
    num_steps: int | None = None,
    num_tokens: int | None = None,
) -> dict[str, float]:
    """Return `<split>_runtime` in seconds and, for counts that are not None, samples, steps and tokens per second.

    Args:
        split: prefix of the keys.
        start_s: `time.perf_counter()` at the start.
        num_samples: samples used since.
        num_steps: steps completed since.
        num_tokens: tokens used since.
    """
    elapsed_s = time.perf_counter() - start_s
    counts = {"samples": num_samples, "steps": num_steps, "tokens": num_tokens}
    rates = {
        f"{split}_{unit}_per_second": round(count / elapsed_s, 3)
        for unit, count in counts.items()
        if count is not None and elapsed_s > 0
    }
    return {f"{split}_runtime": round(elapsed_s, 4), **rates}


def save_metrics(folder: Path, split: str, metrics: dict[str, Any], combined: bool) -> None:
    """Write `<split>_results.json`, and merge the metrics into `all_results.json` if `combined`."""
    folder.mkdir(parents=True, exist_ok=True)
    _write_json(folder / f"{split}_results.json", metrics)
    if combined:
        merged = folder / "all_results.json"
        earlier = json.loads(merged.read_text(encoding="utf-8")) if merged.exists() else {}
        _write_json(merged, {**earlier, **metrics})


def format_metrics(metrics: dict[str, Any]) -> dict[str, Any]:
    """Return metrics in readable form: run times as h:m:s, operations in GF, numbers to four decimals."""
    readable: dict[str, Any] = {}
    for name, value in metrics.items():
        if name.endswith("_runtime"):
            minutes, seconds = divmod(value, 60)
            hours, minutes = divmod(int(minutes), 60)
            readable[name] = f"{hours}:{minutes:02d}:{seconds:05.2f}"
        elif name == "total_flos":
            readable[name] = f"{value / 2**30:.0f}GF"
        elif "_mem_" in name:
            readable[name] = f"{value >> 20}MB"
        else:
            readable[name] = round(value, 4) if isinstance(value, float) else value
    return readable


def metric_lines(readable: dict[str, Any]) -> list[str]:
    """Return one aligned line for each of the metrics that `format_metrics` returned, sorted by name."""
    texts = {printable(name): printable(str(value)) for name, value in readable.items()}
    names, values = max(map(len, texts), default=0), max(map(len, texts.values()), default=0)
    return [f"  {name:<{names}} = {texts[name]:>{values}}" for name in sorted(texts)]


def _write_json(path: Path, content: dict[str, Any]) -> None:
    write_whole(path, (json.dumps(content, indent=4, sort_keys=True) + "\n").encode())
