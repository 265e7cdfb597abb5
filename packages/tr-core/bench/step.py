"""Measure what a training step costs: a hand-written loop, this Trainer, that of transformers, and Lightning's.

All train the same model on the same rows in one process, in turn, several rounds; a step is timed from forward to
forward inside the model itself, so that nothing of a framework's start or end counts. Read the ratios: absolute times
are those of this machine now.

Run: nox -s bench -- step [--rounds 9 --steps 400], or with `-- defaults` for `defaults.py`
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import json
import logging
import os
import platform
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader

BATCH = 8
WARM_UP = 50


class Timed(nn.Module):
    """A stack of linear layers that notes when each forward begins.

    Args:
        width: size of the layers.
        depth: number of layers.
    """

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(width, width) for _ in range(depth)))
        self.marks: list[float] = []

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        self.marks.append(time.perf_counter())
        logits = self.layers(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}

    def step_s(self) -> float:
        """Return the median time from one forward to the next, in seconds, after warming up."""
        marks = self.marks[WARM_UP:]
        return statistics.median(later - earlier for earlier, later in itertools.pairwise(marks))


def rows(width: int, number: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(number, width, generator=generator)
    return [{"x": row, "labels": torch.tensor(i % width)} for i, row in enumerate(features)]


def by_hand(model: Timed, data: list, steps: int) -> None:
    """The loop that one would write: clipping, a schedule, no logging."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / steps))
    parameters = list(model.parameters())
    total = torch.zeros(())
    model.train()
    for batch in DataLoader(data, batch_size=BATCH, shuffle=True):
        loss = model(**batch)["loss"]
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        total += loss.detach()


def ours(model: Timed, data: list, steps: int) -> None:
    from tr_core import Trainer, TrainingArguments

    args = TrainingArguments(output_dir=tempfile.mkdtemp(), **COMMON, use_cpu=True)
    Trainer(model, args, train_dataset=data).train()


def reference(model: Timed, data: list, steps: int) -> None:
    from transformers import Trainer, TrainingArguments

    args = TrainingArguments(output_dir=tempfile.mkdtemp(), **COMMON, use_cpu=True, optim="adamw_torch_fused")
    Trainer(model, args, train_dataset=data).train()


def lightning(model: Timed, data: list, steps: int) -> None:
    import lightning.pytorch as pl

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def training_step(self, batch, index):
            return self.inner(**batch)["loss"]

        def configure_optimizers(self):
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-4, fused=True)
            schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / steps))
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    trainer = pl.Trainer(max_epochs=1, accelerator="cpu", devices=1, gradient_clip_val=1.0, **quiet)
    trainer.fit(Module(), DataLoader(data, batch_size=BATCH, shuffle=True))


COMMON = {
    "per_device_train_batch_size": BATCH,
    "num_train_epochs": 1,
    "save_strategy": "no",
    "logging_steps": 10_000,
    "learning_rate": 1e-4,
    "disable_tqdm": True,
    "report_to": "none",
    "log_level": "error",
}
CONTENDERS: dict[str, Callable[[Timed, list, int], None]] = {
    "by hand": by_hand,
    "tr-core": ours,
    "transformers": reference,
    "lightning": lightning,
}
SIZES = {"2 layers of 16": (16, 2), "8 layers of 256": (256, 8), "60 layers of 64": (64, 60)}


def measure(size: tuple[int, int], rounds: int, steps: int) -> dict[str, list[float]]:
    """Time every contender once a round, beginning with another one each round."""
    width, depth = size
    data = rows(width, steps * BATCH)
    found: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    names = list(CONTENDERS)
    for number in range(rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            torch.manual_seed(0)
            model = Timed(width, depth)
            with contextlib.redirect_stdout(io.StringIO()):  # of what they say at the end of a run
                CONTENDERS[name](model, data, steps)
            found[name].append(model.step_s())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7, help="times that each one runs (default 7)")
    parser.add_argument("--steps", type=int, default=400, help="steps of each run (default 400)")
    parser.add_argument("--defaults", action="store_true", help="what the default callbacks cost a step instead")
    parser.add_argument("--json", type=Path, help="also write the ratios to this file")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    if options.defaults:
        import defaults

        write(options.json, defaults.main(options.rounds, options.steps))
        return
    print(f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}, one thread, CPU")
    print(f"{options.rounds} interleaved rounds of {options.steps} steps, batch {BATCH}; medians\n")
    results: dict[str, dict[str, dict[str, float]]] = {}
    for title, size in SIZES.items():
        found, results[title] = measure(size, options.rounds, options.steps), {}
        base = statistics.median(found["by hand"])
        print(f"{title}\n  {'':14}  {'step':>9}  {'over by hand':>12}  {'ratio':>6}  {'of rounds':>13}")
        for name, times in found.items():
            middle = statistics.median(times)
            # Each round's own ratio: what disturbs a round disturbs all of it.
            ratios = sorted(mine / hand for mine, hand in zip(times, found["by hand"], strict=True))
            ratio, spread = statistics.median(ratios), f"{ratios[0]:.2f} - {ratios[-1]:.2f}"
            over = (middle - base) * 1e3
            print(f"  {name:14}  {middle * 1e3:6.3f} ms  {over:9.3f} ms  {ratio:6.2f}  {spread:>13}")
            results[title][name] = {"ratio": ratio, "lowest": ratios[0], "highest": ratios[-1], "step_s": middle}
        print(flush=True)
    write(options.json, results)


def write(path: Path | None, results: object) -> None:
    """Write results to a file, if there is one."""
    if path is not None:
        path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
