"""Define what training, evaluation and prediction return, and what `compute_metrics` receives."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, NamedTuple


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
