"""Measure what evaluating one sample costs as the samples become more: this Trainer, and that of transformers.

A model gives 2,000 numbers a sample, all of which are collected for `compute_metrics`. Both trainers evaluate the same
model in one process, in turn; every size is measured between evaluations of the smallest one, before and after, with
which it is compared. What is collected of 64,000 samples is half
a gigabyte: they are evaluated once before anything is timed, to see what memory that takes, and because a machine is
slow the first time that memory is touched. Times are the processor's for this process: nothing here waits for anything,
and what other programs do meanwhile counts little.

The reference joins every batch to all before it, so its time grows like the square of the samples: it is measured up to
`--reference-limit` only.

Run: nox -s bench -- evaluation [--rounds 5 --reference-limit 16000]
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import io
import logging
import os
import platform
import resource
import statistics
import tempfile
import time
import warnings
from typing import Any, NamedTuple

import torch
from torch import nn

OUTPUTS = 2_000
SIZES = (2_000, 8_000, 16_000, 64_000)
GOAL = 1.2


class Wide(nn.Module):
    """A layer that gives many numbers for few."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(8, OUTPUTS)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.layer(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class Same:
    """A data set that costs nothing to read: one sample, again and again."""

    def __init__(self, number: int) -> None:
        self.number, self.sample = number, {"x": torch.ones(8), "labels": torch.tensor(3)}

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return self.sample


def count(prediction: Any) -> dict[str, float]:
    return {"rows": len(prediction.predictions)}


def trainer_of(module: Any) -> Any:
    args = module.TrainingArguments(
        output_dir=tempfile.mkdtemp(), disable_tqdm=True, report_to="none", log_level="error", use_cpu=True
    )
    return module.Trainer(Wide(), args, compute_metrics=count)


def evaluate_s(trainer: Any, number: int) -> float:
    """Return how many seconds of the processor an evaluation takes for one sample."""
    data = Same(number)
    give_memory_back()
    start = time.process_time()
    with contextlib.redirect_stdout(io.StringIO()):  # of the entries of the log
        metrics = trainer.evaluate(data)
    assert metrics["eval_rows"] == number
    return (time.process_time() - start) / number


def give_memory_back() -> None:
    """Have the system take back what the last evaluation freed, where the C library can do that.

    Else a small evaluation finds the memory of the one before it, and a large one alone has to ask for its own.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


class Contender(NamedTuple):
    """A trainer, the sizes it is measured at, and how often it evaluates the smallest one for a mean."""

    trainer: Any
    sizes: tuple[int, ...]
    repeats: int


def peak_mib() -> float:
    """Return the most memory that this process has held so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def mean_s(trainer: Any, number: int, times: int) -> float:
    return statistics.mean(evaluate_s(trainer, number) for _ in range(times))


def measure(contenders: dict[str, Contender], rounds: int) -> dict[str, dict[int, list[tuple[float, float]]]]:
    """Return, by contender and size, each round's seconds a sample, and those of the smallest size around it."""
    found: dict[str, dict[int, list[tuple[float, float]]]] = {
        name: {number: [] for number in contender.sizes} for name, contender in contenders.items()
    }
    for _ in range(rounds):
        for number in SIZES:
            for name, (trainer, sizes, repeats) in contenders.items():
                if number in sizes:
                    before = mean_s(trainer, min(SIZES), repeats)
                    mine = mean_s(trainer, number, repeats if number == min(SIZES) else 1)
                    after = mean_s(trainer, min(SIZES), repeats)
                    found[name][number].append((mine, (before + after) / 2))
    return found


def report(name: str, times: dict[int, list[tuple[float, float]]]) -> float:
    """Print a contender's table and return its growth: the last size's time a sample over the first's."""
    print(f"{name}\n  {'samples':>8}  {'a sample':>10}  {'beside 2,000':>12}  {'of rounds':>13}")
    growth = 1.0
    for number, rounds in times.items():
        ratios = sorted(mine / base for mine, base in rounds)
        growth = statistics.median(ratios)
        spread = f"{ratios[0]:.2f} - {ratios[-1]:.2f}"
        print(f"  {number:8,}  {statistics.median(t for t, _ in rounds) * 1e3:7.4f} ms  {growth:12.2f}  {spread:>13}")
    print(flush=True)
    return growth


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="times that each size is evaluated (default 5)")
    parser.add_argument(
        "--reference-limit",
        type=int,
        default=8_000,
        help="samples up to which the reference is measured; 0: not at all",
    )
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    print(f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}, one thread, CPU")
    print(f"{options.rounds} interleaved rounds, {OUTPUTS:,} numbers a sample, batch 8; medians\n")
    import tr_core

    contenders = {"tr-core": Contender(trainer_of(tr_core), SIZES, repeats=8)}
    if options.reference_limit:
        import transformers

        limited = tuple(number for number in SIZES if number <= options.reference_limit)
        contenders["transformers"] = Contender(trainer_of(transformers), limited, repeats=1)
    for contender in contenders.values():
        evaluate_s(contender.trainer, 200)
    before = peak_mib()
    evaluate_s(contenders["tr-core"].trainer, max(SIZES))
    taken, arrays = peak_mib() - before, max(SIZES) * OUTPUTS * 4 / 2**20
    print(f"tr-core takes {taken:.0f} MiB for {max(SIZES):,} samples, whose numbers are {arrays:.0f} MiB\n")
    found = measure(contenders, options.rounds)
    growth = {name: report(name, times) for name, times in found.items()}
    print(
        f"tr-core: {growth['tr-core']:.2f} times as long a sample at {max(SIZES):,} as at {min(SIZES):,}; goal {GOAL}"
    )


if __name__ == "__main__":
    main()
