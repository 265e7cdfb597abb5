"""Measure what `on_spike="rewind"` costs a step: without it, with a snapshot every 64 steps, and with one every step.

All train the same model on the same rows in one process, in turn, several rounds. A step is the mean from one forward
to the next, as most steps take no snapshot, in time of this process: what else the machine does counts little. Read
the ratios of a round's runs.

Run: nox -s bench -- rewind [--rounds 5 --steps 640]
"""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import os
import platform
import statistics
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from step import COMMON, Timed, rows, write

from tr_core import Trainer, TrainingArguments

WARM_UP = 64
CONTENDERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "snapshot_steps=64": {"on_spike": "rewind", "snapshot_steps": 64},
    "snapshot_steps=1": {"on_spike": "rewind", "snapshot_steps": 1},
}
SIZES = {  # width, layers, samples of a step
    "2 layers of 16, 8 samples": (16, 2, 8),
    "8 layers of 256, 8 samples": (256, 8, 8),
    "8 layers of 256, 256 samples": (256, 8, 256),
    "8 layers of 1024, 64 samples": (1024, 8, 64),
}


class TimedByProcess(Timed):
    """Notes the time of this process when each forward begins."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        given = super().forward(x, labels)
        self.marks[-1] = time.process_time()
        return given

    def step_s(self) -> float:
        """Return the mean time from one forward to the next, in seconds, after warming up."""
        marks = self.marks[WARM_UP:]
        return (marks[-1] - marks[0]) / (len(marks) - 1)


def measure(size: tuple[int, int, int], rounds: int, steps: int) -> dict[str, list[float]]:
    """Return the seconds of a step of every contender once a round, beginning with another one each round."""
    width, depth, batch = size
    data = rows(width, 8 * batch)
    found: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    names = list(CONTENDERS)
    for number in range(rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            torch.manual_seed(0)
            model = TimedByProcess(width, depth)
            options = COMMON | {"max_steps": steps, "per_device_train_batch_size": batch} | CONTENDERS[name]
            args = TrainingArguments(output_dir=tempfile.mkdtemp(), **options, use_cpu=True)
            with contextlib.redirect_stdout(io.StringIO()):  # of what it says at the end of a run
                Trainer(model, args, train_dataset=data).train()
            found[name].append(model.step_s())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="times that each one runs (default 5)")
    parser.add_argument("--steps", type=int, default=640, help="steps of each run (default 640)")
    parser.add_argument("--json", type=Path, help="also write the ratios to this file")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    print(f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}, one thread, CPU")
    print(f"{options.rounds} interleaved rounds of {options.steps} steps; a step's mean, medians of rounds\n")
    results: dict[str, dict[str, dict[str, float]]] = {}
    for title, size in SIZES.items():
        # The last one is slow: it takes as many steps as two snapshots need.
        steps = options.steps if size[0] < 1024 else WARM_UP + 129
        found, results[title] = measure(size, options.rounds, steps), {}
        print(title)
        for name, times in found.items():
            ratios = sorted(mine / plain for mine, plain in zip(times, found["plain"], strict=True))
            ratio, middle = statistics.median(ratios), statistics.median(times)
            print(f"  {name:18}  {middle * 1e3:8.3f} ms  {ratio:6.3f}  {ratios[0]:.3f} - {ratios[-1]:.3f}")
            results[title][name] = {"ratio": ratio, "lowest": ratios[0], "highest": ratios[-1], "step_s": middle}
        print(flush=True)
    write(options.json, results)


if __name__ == "__main__":
    main()
