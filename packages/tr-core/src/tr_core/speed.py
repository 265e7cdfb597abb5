"""Reckon run time and throughput."""

from __future__ import annotations

import time


def speed_metrics(
    split: str,
    start_s: float,
    num_samples: float | None = None,
    num_steps: int | None = None,
    num_tokens: int | None = None,
) -> dict[str, float]:
    """Return `<split>_runtime` in seconds and, where counts are given, samples, steps and tokens per second.

    Args:
        split: prefix of the keys.
        start_s: `time.perf_counter()` at the start.
        num_samples: samples used since.
        num_steps: steps made since.
        num_tokens: tokens used since.
    """
    runtime = time.perf_counter() - start_s
    metrics = {f"{split}_runtime": round(runtime, 4)}
    if runtime == 0:
        return metrics
    if num_samples is not None:
        metrics[f"{split}_samples_per_second"] = round(num_samples / runtime, 3)
    if num_steps is not None:
        metrics[f"{split}_steps_per_second"] = round(num_steps / runtime, 3)
    if num_tokens is not None:
        metrics[f"{split}_tokens_per_second"] = round(num_tokens / runtime, 3)
    return metrics
