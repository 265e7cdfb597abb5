"""Measure what a step of two ranks costs: loops by hand on torch, `Loop`, this Trainer, and that of transformers.

Two processes train the same model on the same rows over gloo; every contender has two fresh ones, in turn, several
rounds. A step is timed from forward to forward inside the model itself, on the first rank, so that nothing of a
framework's start or end counts. Read the ratios: absolute times are those of this machine now.

Run: nox -s bench -- two-ranks [--rounds 5 --steps 300]
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
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler

from tr_dist import DDP, Loop
from tr_dist.fsdp import FSDP, Sharding
from tr_dist.testing import run_ranks

BATCH, RANKS, WARM_UP = 8, 2, 50
Rows = list[dict[str, torch.Tensor]]


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


def rows(width: int, number: int) -> Rows:
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(number, width, generator=generator)
    return [{"x": row, "labels": torch.tensor(i % width)} for i, row in enumerate(features)]


def join() -> None:
    """Join the other rank as a script of one's own does, without this library."""
    dist.init_process_group(
        "gloo",
        init_method=f"file://{os.environ['TR_RENDEZVOUS_FILE']}_by_hand",
        rank=int(os.environ["RANK"]),
        world_size=RANKS,
    )


def ddp_by_hand(model: Timed, data: Rows, steps: int) -> None:
    """The loop that one would write: clipping, a schedule, no logging."""
    join()
    wrapped = nn.parallel.DistributedDataParallel(model)
    by_hand(wrapped, data, steps)
    del wrapped
    dist.destroy_process_group()


def fsdp_by_hand(model: Timed, data: Rows, steps: int) -> None:
    join()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    by_hand(model, data, steps)
    dist.destroy_process_group()


def by_hand(model: nn.Module, data: Rows, steps: int) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / steps))
    parameters = list(model.parameters())
    total = torch.zeros(())
    model.train()
    for batch in DataLoader(data, batch_size=BATCH, sampler=DistributedSampler(data)):
        loss = model(**batch)["loss"]
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        total += loss.detach()


def by_loop(model: Timed, data: Rows, steps: int, *, strategy: Callable[[], Any]) -> None:
    """The same loop through `tr_dist.Loop`."""
    with Loop(strategy()) as loop:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / steps))
        loader, wrapped, optimizer = loop.prepare(DataLoader(data, batch_size=BATCH, shuffle=True), model, optimizer)
        total = torch.zeros(())
        wrapped.train()
        for batch in loader:
            loss = wrapped(**batch)["loss"]
            loop.backward(loss)
            loop.clip_grad_norm(1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            total += loss.detach()


def ours(model: Timed, data: Rows, steps: int, **options: Any) -> None:
    from tr_core import Trainer, TrainingArguments

    args = TrainingArguments(output_dir=tempfile.mkdtemp(), **COMMON, **options)
    trainer = Trainer(model, args, train_dataset=data)
    trainer.train()
    trainer.strategy.close()


def reference(model: Timed, data: Rows, steps: int) -> None:
    from transformers import Trainer, TrainingArguments

    join()
    args = TrainingArguments(output_dir=tempfile.mkdtemp(), **COMMON, optim="adamw_torch_fused")
    Trainer(model, args, train_dataset=data).train()
    dist.destroy_process_group()


COMMON = {
    "per_device_train_batch_size": BATCH,
    "num_train_epochs": 1,
    "save_strategy": "no",
    "logging_steps": 10_000,
    "learning_rate": 1e-4,
    "disable_tqdm": True,
    "report_to": "none",
    "log_level": "error",
    "use_cpu": True,
    "ddp_find_unused_parameters": False,
}
_BY_LAYER = Sharding(wrap="TRANSFORMER_BASED_WRAP", layer_classes=("Linear",))
_UNITS = {"transformer_layer_cls_to_wrap": ["Linear"]}
Contender = Callable[[Timed, Rows, int], None]
TABLES: dict[str, dict[str, Contender]] = {
    "DDP": {
        "by hand": ddp_by_hand,
        "Loop": partial(by_loop, strategy=partial(DDP, use_cpu=True)),
        "Trainer": partial(ours, strategy="ddp"),
        "elastic": partial(ours, elastic="bitwise", virtual_shards=RANKS),
        "transformers": reference,
    },
    "FSDP2, a unit each layer": {
        "by hand": fsdp_by_hand,
        "Loop": partial(by_loop, strategy=lambda: FSDP(_BY_LAYER, use_cpu=True)),
        "Trainer": partial(ours, fsdp="full_shard auto_wrap", fsdp_config=_UNITS),
        "elastic": partial(
            ours, fsdp="full_shard auto_wrap", fsdp_config=_UNITS, elastic="bitwise", virtual_shards=RANKS
        ),
    },
}
SIZES = {"2 layers of 16": (16, 2), "8 layers of 256": (256, 8)}


def run(table: str, name: str, size: tuple[int, int], steps: int) -> float:
    """Train once as one of the ranks; return the seconds of a step."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    if hasattr(os, "sched_setaffinity"):  # else the times depend on where the system puts threads of the exchange
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[int(os.environ["RANK"]) % len(cores)]})
    width, depth = size
    torch.manual_seed(0)
    model = Timed(width, depth)
    with contextlib.redirect_stdout(io.StringIO()):  # of what they say at the end of a run
        TABLES[table][name](model, rows(width, steps * BATCH * RANKS), steps)
    return model.step_s()


def measure(table: str, size: tuple[int, int], rounds: int, steps: int) -> dict[str, list[float]]:
    """Time every contender once a round, beginning with another one each round."""
    names = list(TABLES[table])
    found: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            found[name].append(run_ranks(run, RANKS, table, name, size, steps, timeout_s=600)[0])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="times that each one runs (default 5)")
    parser.add_argument("--steps", type=int, default=300, help="steps of each run (default 300)")
    parser.add_argument("--only", choices=TABLES, help="one of the tables")
    parser.add_argument("--json", type=Path, help="also write the ratios to this file")
    options = parser.parse_args()
    results: dict[str, dict[str, dict[str, float]]] = {}
    print(f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}, gloo; {RANKS} ranks, a core each")
    print(f"{options.rounds} interleaved rounds of {options.steps} steps, batch {BATCH}; medians\n")
    for table, (title, size) in itertools.product([options.only] if options.only else TABLES, SIZES.items()):
        found = measure(table, size, options.rounds, options.steps)
        base = statistics.median(found["by hand"])
        print(f"{table}, {title}\n  {'':14}  {'step':>9}  {'over by hand':>12}  {'ratio':>6}  {'of rounds':>13}")
        for name, times in found.items():
            middle = statistics.median(times)
            # Each round's own ratio: what disturbs a round disturbs all of it.
            ratios = sorted(mine / hand for mine, hand in zip(times, found["by hand"], strict=True))
            ratio, spread = statistics.median(ratios), f"{ratios[0]:.2f} - {ratios[-1]:.2f}"
            over = (middle - base) * 1e3
            print(f"  {name:14}  {middle * 1e3:6.3f} ms  {over:9.3f} ms  {ratio:6.2f}  {spread:>13}")
            of_size = results.setdefault(f"{table}, {title}", {})
            of_size[name] = {"ratio": ratio, "lowest": ratios[0], "highest": ratios[-1], "step_s": middle}
        print(flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
