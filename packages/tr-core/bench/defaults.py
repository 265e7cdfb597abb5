"""Measure what the default callbacks cost a step: the display, the files of metrics and events, the report of the run.

Two Trainers train the same model on the same rows in one process, in turn, several rounds: one with all defaults, on a
terminal, and one with `disable_tqdm` and without the callbacks. What counts is the processor time of the process from
the first forward after warming up to the last, logs and drawings included. Read the ratios.

Run: nox -s bench -- defaults --rounds 7 --steps 4000
"""

from __future__ import annotations

import contextlib
import os
import pty
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator

import torch
from step import BATCH, Timed, rows

from tr_core import DefaultFlowCallback, Trainer, TrainingArguments

WARM_UP = 100
SIZES = {"2 layers of 16": (16, 2), "8 layers of 256": (256, 8)}


class Spent(Timed):
    """A model that notes the processor time of the process when each forward begins."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        outputs = super().forward(x, labels)
        self.marks[-1] = time.process_time()
        return outputs

    def step_s(self) -> float:
        """Return the mean time of a step, in seconds, after warming up."""
        return (self.marks[-1] - self.marks[WARM_UP]) / (len(self.marks) - 1 - WARM_UP)


@contextlib.contextmanager
def terminal() -> Iterator[None]:
    """Make standard error a terminal in the block, whose other end is read and thrown away."""
    ours, theirs = pty.openpty()
    os.environ["COLUMNS"] = "120"

    def drain() -> None:
        with contextlib.suppress(OSError):
            while os.read(ours, 65536):
                pass

    reader = threading.Thread(target=drain, daemon=True)
    reader.start()
    with open(theirs, "w", encoding="utf-8") as stream, contextlib.redirect_stderr(stream):
        yield
    os.close(ours)


def train(model: Spent, data: list, *, with_defaults: bool) -> None:
    args = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=BATCH,
        num_train_epochs=1,
        save_strategy="no",
        log_level="error",
        use_cpu=True,
        disable_tqdm=not with_defaults,
    )
    trainer = Trainer(model, args, train_dataset=data)
    if not with_defaults:
        for callback in list(trainer.callback_handler.callbacks):
            if type(callback) is not DefaultFlowCallback:
                trainer.remove_callback(callback)
    trainer.train()


def measure(title: str, rounds: int, steps: int) -> dict[str, float]:
    """Print and return the ratio of a step with all defaults to one without, for one size."""
    width, depth = SIZES[title]
    data = rows(width, steps * BATCH)
    spent: dict[bool, list[float]] = {True: [], False: []}
    for number in range(rounds):
        for with_defaults in (True, False) if number % 2 else (False, True):
            torch.manual_seed(0)
            model = Spent(width, depth)
            with terminal():
                train(model, data, with_defaults=with_defaults)
            spent[with_defaults].append(model.step_s())
    ratios = sorted(on / off for on, off in zip(spent[True], spent[False], strict=True))
    print(
        f"{title:16} {statistics.median(spent[False]) * 1e3:7.3f} ms without, "
        f"{statistics.median(spent[True]) * 1e3:7.3f} ms with all defaults: ratio {statistics.median(ratios):.3f} "
        f"({ratios[0]:.3f} - {ratios[-1]:.3f})",
        file=sys.__stdout__,
        flush=True,
    )
    return {"ratio": statistics.median(ratios), "lowest": ratios[0], "highest": ratios[-1]}


def main(rounds: int, steps: int) -> dict[str, dict[str, float]]:
    """Print and return what the defaults cost, by size."""
    print(f"{rounds} interleaved rounds of {steps} steps, a log every 500, the default\n")
    return {title: measure(title, rounds, steps) for title in SIZES}
