"""Compare captured steps (`step_compile`) with ordinary ones, and with a loop written by hand.

All train the same model on the same rows in one process, in turn, several rounds. A run is timed from its step 60 to
its last one: by the processor time of this process on a CPU, by the clock on CUDA, where the ends wait for the device.

Run: nox -s bench -- capture [--rounds 9 --steps 600 --json FILE]
"""

from __future__ import annotations

import argparse
import contextlib
import io
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

from tr_core import Trainer, TrainerCallback, TrainingArguments
from tr_core.capture import running

BATCH, WARM_UP = 8, 60
SIZES = {"2 layers of 16": (16, 2), "8 layers of 256": (256, 8), "60 layers of 64": (64, 60)}
IS_CUDA = torch.cuda.is_available()


class Layers(nn.Module):
    """A stack of linear layers."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(width, width) for _ in range(depth)))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": nn.functional.cross_entropy(self.layers(x), labels)}


class Timer(TrainerCallback):
    """Notes when the steps after warming up begin and end."""

    def __init__(self, steps: int) -> None:
        self.steps, self.began_s, self.ended_s = steps, 0.0, 0.0

    def on_step_end(self, args, state, control, **kwargs) -> None:
        self.note(state.global_step)

    def note(self, step: int) -> None:
        if step in (WARM_UP, self.steps):
            if IS_CUDA:
                torch.cuda.synchronize()
            now = time.perf_counter() if IS_CUDA else time.process_time()
            self.began_s, self.ended_s = (now, 0.0) if step == WARM_UP else (self.began_s, now)

    def step_s(self) -> float:
        return (self.ended_s - self.began_s) / (self.steps - WARM_UP)


def by_hand(model: Layers, data: list, timer: Timer) -> None:
    """The loop that one would write: clipping and a schedule."""
    device = torch.device("cuda" if IS_CUDA else "cpu")
    model.to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / timer.steps))
    parameters = list(model.parameters())
    for number, batch in enumerate(DataLoader(data, batch_size=BATCH, shuffle=True), start=1):
        loss = model(**{name: value.to(device, non_blocking=True) for name, value in batch.items()})["loss"]
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        timer.note(number)


def ours(
    step_compile: str, *, compiles: bool = True, torch_compile: bool = False
) -> Callable[[Layers, list, Timer], None]:
    def train(model: Layers, data: list, timer: Timer) -> None:
        args = TrainingArguments(
            output_dir=tempfile.mkdtemp(),
            per_device_train_batch_size=BATCH,
            num_train_epochs=1,
            save_strategy="no",
            logging_steps=10_000,
            learning_rate=1e-4,
            disable_tqdm=True,
            report_to="none",
            log_level="error",
            step_compile=step_compile,
            torch_compile=torch_compile,
        )
        usual = running.cpp_compiler
        running.cpp_compiler = usual if compiles else lambda: None
        try:
            Trainer(model, args, train_dataset=data, callbacks=[timer]).train()
        finally:
            running.cpp_compiler = usual

    return train


CONTENDERS: dict[str, Callable[[Layers, list, Timer], None]] = {"ordinary": ours("off"), "by hand": by_hand}
if IS_CUDA:
    CONTENDERS["CUDA graph"] = ours("graph")
else:
    CONTENDERS["one by one"] = ours("graph", compiles=False)
    if running.cpp_compiler() is not None:
        CONTENDERS["compiled"] = ours("graph")
CONTENDERS["torch_compile"] = ours("off", torch_compile=True)


def measure(size: tuple[int, int], rounds: int, steps: int) -> dict[str, list[float]]:
    """Time every contender once a round, beginning with another one each round."""
    width, depth = size
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(steps * BATCH, width, generator=generator)
    data = [{"x": row, "labels": torch.tensor(i % width)} for i, row in enumerate(features)]
    found: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    names = list(CONTENDERS)
    for number in range(rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            torch.manual_seed(0)
            timer = Timer(steps)
            with contextlib.redirect_stdout(io.StringIO()):  # of what they say at the end of a run
                CONTENDERS[name](Layers(width, depth), data, timer)
            found[name].append(timer.step_s())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7, help="times that each one runs (default 7)")
    parser.add_argument("--steps", type=int, default=600, help="steps of each run (default 600)")
    parser.add_argument("--json", type=Path, help="also write the ratios to this file")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    device = torch.cuda.get_device_name() if IS_CUDA else "CPU"
    print(f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}, one thread, {device}")
    print(
        f"{options.rounds} interleaved rounds of {options.steps} steps, batch {BATCH}; medians of the rounds' ratios\n"
    )
    results: dict[str, dict[str, dict[str, float]]] = {}
    for title, size in SIZES.items():
        found, results[title] = measure(size, options.rounds, options.steps), {}
        print(f"{title}\n  {'':12}  {'to ordinary':>11}  {'of rounds':>13}")
        for name, times in found.items():
            ratios = sorted(mine / base for mine, base in zip(times, found["ordinary"], strict=True))
            ratio, step_s = statistics.median(ratios), statistics.median(times)
            print(f"  {name:12}  {ratio:11.2f}  {ratios[0]:5.2f} - {ratios[-1]:5.2f}", flush=True)
            results[title][name] = {"ratio": ratio, "lowest": ratios[0], "highest": ratios[-1], "step_s": step_s}
        print(flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
