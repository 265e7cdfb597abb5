"""Measure a run that logs, evaluates and saves often, against the same run of transformers' Trainer.

A tiny model is trained in one process by both, in turn, several rounds: a log every 2 steps, an evaluation every 20, a
save every 50, at most 3 checkpoints kept. `--only` measures one of these alone. What counts is the time of the whole
call of `train`. Read the ratios.

Run: python packages/tr-ckpt/bench/frequent.py [--rounds 7 --steps 2000 --only save --json FILE]
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import nn

WIDTH = 16
BATCH = 8
PERIODS = {"log": 2, "evaluate": 20, "save": 50}
EVALUATED = 64


class Tiny(nn.Module):
    """Two layers of 16: the time of a run is that of the trainer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        outputs = self.layers(x)
        return {"loss": nn.functional.mse_loss(outputs, labels), "logits": outputs}


def rows(count: int) -> list[dict[str, torch.Tensor]]:
    drawn = torch.Generator().manual_seed(0)
    x, labels = torch.randn(count, WIDTH, generator=drawn), torch.randn(count, WIDTH, generator=drawn)
    return [{"x": x[index], "labels": labels[index]} for index in range(count)]


def arguments(options: argparse.Namespace, directory: Path) -> dict[str, Any]:
    wanted = PERIODS if options.only is None else {options.only: PERIODS[options.only]}
    never = 10 * options.steps
    return {
        "output_dir": str(directory),
        "max_steps": options.steps,
        "per_device_train_batch_size": BATCH,
        "per_device_eval_batch_size": BATCH,
        "logging_steps": wanted.get("log", never),
        "eval_strategy": "steps" if "evaluate" in wanted else "no",
        "eval_steps": wanted.get("evaluate", never),
        "save_strategy": "steps" if "save" in wanted else "no",
        "save_steps": wanted.get("save", never),
        "save_total_limit": 3,
        "report_to": [],
        "use_cpu": True,
        "log_level": "error",
        "seed": 1,
    }


def builders() -> dict[str, Callable[..., Any]]:
    import transformers

    import tr_core

    def make(package: Any) -> Callable[..., Any]:
        return lambda given, **data: package.Trainer(Tiny(), package.TrainingArguments(**given), **data)

    return {"tr-core": make(tr_core), "transformers": make(transformers)}


def train(build: Callable[..., Any], options: argparse.Namespace, above: Path) -> tuple[float, float]:
    """Return the processor time and the time of a call of `train`, in seconds."""
    directory = Path(tempfile.mkdtemp(dir=above))
    torch.manual_seed(0)
    data = rows(options.steps * BATCH // 4)
    trainer = build(arguments(options, directory), train_dataset=data, eval_dataset=rows(EVALUATED))
    os.sync()  # what was written earlier is not a part of this
    begun, spent = time.perf_counter(), time.process_time()
    trainer.train()
    taken = time.process_time() - spent, time.perf_counter() - begun
    shutil.rmtree(directory)
    return taken


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--only", choices=PERIODS, default=None, help="log, evaluate or save alone")
    parser.add_argument("--directory", default=None, help="where to save; the system's temporary folder")
    parser.add_argument("--json", type=Path, default=None, help="also write the results to this file")
    return parser.parse_args()


def main() -> None:
    options = parse()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    makers = builders()
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in makers}
    silenced = sys.stdout, sys.stderr
    with tempfile.TemporaryDirectory(dir=options.directory) as above, open(os.devnull, "w") as nothing:
        sys.stdout = sys.stderr = nothing
        try:
            for number in range(options.rounds):
                for name in list(makers) if number % 2 else reversed(makers):
                    taken[name].append(train(makers[name], options, Path(above)))
        finally:
            sys.stdout, sys.stderr = silenced
    report(options, taken)


def report(options: argparse.Namespace, taken: dict[str, list[tuple[float, float]]]) -> None:
    results: dict[str, Any] = {}
    for place, what in enumerate(("cpu", "wall")):
        times = {name: [each[place] for each in taken[name]] for name in taken}
        ratios = sorted(ours / theirs for ours, theirs in zip(*times.values(), strict=True))
        results[what] = {
            "ratio": statistics.median(ratios),
            "lowest": ratios[0],
            "highest": ratios[-1],
            **{f"{name}_s": statistics.median(each) for name, each in times.items()},
        }
    periods = PERIODS if options.only is None else {options.only: PERIODS[options.only]}
    about = {
        "benchmark": "frequent",
        "periods": periods,
        "steps": options.steps,
        "rounds": options.rounds,
        "torch": torch.__version__,
        "transformers": metadata.version("transformers"),
        "machine": platform.machine(),
    }
    print(f"{options.rounds} interleaved rounds of {options.steps} steps; steps between: {periods}")
    for what, found in results.items():
        print(
            f"{what:5} tr-core {found['tr-core_s']:7.2f} s, transformers {found['transformers_s']:7.2f} s: "
            f"ratio {found['ratio']:.3f} ({found['lowest']:.3f} - {found['highest']:.3f})"
        )
    if options.json is not None:
        options.json.write_text(json.dumps({**about, **results}, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
