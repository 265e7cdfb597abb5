"""Be one rank of a job in which a rank hangs or fails as planned: `hang_run.py OUT PLANT [OPTION ...]`.

`test_hangs.py` starts it. What is planted strikes in one rank when it has done two steps.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from two_blocks import make_network

AT_STEP = 2
FOREVER_S = 600


def main() -> None:
    """Train as the command line says."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("plant", choices=[*PLACES, "nothing"])
    parser.add_argument("--strategy", choices=("ddp", "fsdp"), default="ddp")
    parser.add_argument("--rank", type=int, default=1, help="the rank that hangs or fails; -1 is every rank")
    parser.add_argument("--port", help="meet there and not through a file")
    parser.add_argument("--machines", action="store_true", help="each rank has a temporary folder of its own")
    parser.add_argument("--arguments", type=json.loads, default={}, help="further training arguments")
    options = parser.parse_args()
    if options.port:
        del os.environ["TR_RENDEZVOUS_FILE"]
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=options.port)
    rank = int(os.environ["RANK"])
    if options.machines:  # ranks that share no folder are on machines of their own to the watch
        tempfile.tempdir = str(options.out / f"temporary-{rank}")
        os.mkdir(tempfile.tempdir)
    plant = Plant(options.plant, options.rank in (rank, -1), options.out)
    (train_early_end if options.plant == "early end" else train)(options, plant)


class Plant:
    """What hangs or fails, once, when this rank comes to its place after two steps."""

    def __init__(self, name: str, is_here: bool, out: Path) -> None:
        self.name, self.is_here, self.out = name, is_here, out
        self.step = 0
        self.trainer: Any = None

    def reach(self, place: str) -> None:
        """Strike if this is where."""
        where, act = PLACES.get(self.name, ("", int))
        if place == where and self.step == AT_STEP and (self.is_here or self.name in ON_ALL):
            self.step = -1
            (self.out / "struck").write_text(repr(time.time()))
            act(self)


def sleep(plant: Plant) -> None:
    time.sleep(FOREVER_S)


def loop_forever(plant: Plant) -> None:
    while True:
        pass


def hold_the_lock(plant: Plant) -> None:
    re.match(r"(a+)+$", "a" * 60 + "b")  # longer than the universe is old, and Python's lock is held


def fail(plant: Plant) -> None:
    raise ArithmeticError("planted")


def stop(plant: Plant) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def die(plant: Plant) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_unnoticed(plant: Plant) -> None:
    """Die while a child holds the connections open, so that no backend notices."""
    if os.fork() == 0:
        time.sleep(30)
        os._exit(0)
    die(plant)


def kill_worker(plant: Plant) -> None:
    """Kill the process that loads data for this rank."""
    import multiprocessing

    for child in multiprocessing.active_children():
        child.kill()


def evaluate_alone(plant: Plant) -> None:
    plant.trainer.evaluate()


def exchange(plant: Plant) -> None:
    import torch
    import torch.distributed as dist

    if not plant.is_here:  # the planted rank leaves it out
        dist.broadcast(torch.zeros(1), src=1)
        dist.all_reduce(torch.zeros(1))


def exchange_in_other_order(plant: Plant) -> None:
    import torch
    import torch.distributed as dist

    orders = [lambda: dist.monitored_barrier(), lambda: dist.broadcast(torch.zeros(1), src=0)]
    for each in reversed(orders) if plant.is_here else orders:
        each()


def fill_the_disk(plant: Plant) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


PLACES: dict[str, tuple[str, Callable[[Plant], object]]] = {
    "sleep in a step": ("forward", sleep),
    "sleep in loading": ("dataset", sleep),
    "sleep in a callback": ("callback", sleep),
    "sleep in saving": ("write", sleep),
    "sleep in evaluating": ("metrics", sleep),
    "infinite loop": ("callback", loop_forever),
    "held lock": ("callback", hold_the_lock),
    "skipped exchange": ("callback", exchange),
    "other order": ("callback", exchange_in_other_order),
    "one evaluates": ("callback", evaluate_alone),
    "stopped": ("callback", stop),
    "killed": ("forward", die),
    "killed unnoticed": ("backward", die_unnoticed),
    "killed worker": ("callback", kill_worker),
    "full disk": ("write", fill_the_disk),
    "exception": ("forward", fail),
    "exception in a callback": ("callback", fail),
    "early end": ("", int),
    "slow disk": ("", int),
}
ON_ALL = ("skipped exchange", "other order")


def train(options: argparse.Namespace, plant: Plant) -> None:
    """Train by the Trainer."""
    from disk import replace_every_operation

    from tr_core import Trainer, TrainerCallback, TrainingArguments

    class Steps(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            plant.step = state.global_step if plant.step >= 0 else -1
            time.sleep(STEP_S)
            plant.reach("callback")

    def reach(name: str, operation: Any, arguments: tuple[Any, ...]) -> Any:
        if name == "write":
            plant.reach("write")
        if plant.name == "slow disk" and plant.is_here:
            time.sleep(SLOW_S)
        return operation(*arguments)

    sharded = {"fsdp": "full_shard", "fsdp_config": {"transformer_layer_cls_to_wrap": ["Block"]}}
    settings = {
        "output_dir": str(options.out / "run"),
        "per_device_train_batch_size": 2,
        "max_steps": 8,
        "logging_steps": 4,
        "save_strategy": "steps" if plant.name in ("full disk", "sleep in saving", "slow disk") else "no",
        "save_steps": AT_STEP,
        "eval_strategy": "steps" if plant.name in ("sleep in evaluating", "nothing") else "no",
        "eval_steps": AT_STEP,
        "disable_tqdm": True,
        "report_to": "none",
        "use_cpu": True,
        "dataloader_num_workers": 1 if plant.name == "killed worker" else 0,
        "hang_timeout": 5,
        **({"strategy": "ddp"} if options.strategy == "ddp" else sharded),
        **options.arguments,
    }

    def measure(prediction: Any) -> dict[str, float]:
        plant.reach("metrics")
        return {"rows": float(len(prediction.predictions))}

    model, rows = make_network(plant.reach), make_rows(plant)
    trainer = Trainer(
        model, TrainingArguments(**settings), train_dataset=rows, eval_dataset=make_rows(None, rows=8, pause_s=PAUSE_S),
        callbacks=[Steps()], compute_metrics=measure,
    )  # fmt: skip
    plant.trainer = trainer
    replace_every_operation(reach)
    trainer.train()
    trainer.strategy.close()


STEP_S = 0.5  # so that each rank writes a note in each step
SLOW_S = 0.1  # each operation of a slow disk
PAUSE_S = float(os.environ.get("HANG_RUN_PAUSE_S", "0"))


def train_early_end(options: argparse.Namespace, plant: Plant) -> None:
    """Train by a loop of one's own, in which a rank makes fewer steps."""
    import torch

    from tr_dist import DDP

    with DDP(use_cpu=True, hang_timeout_s=5) as strategy:
        model, step = strategy.prepare(torch.nn.Linear(4, 4)), 0
        with strategy.watching(lambda: (step, "compute", 0), str(options.out / "run")):
            for _ in range(AT_STEP if plant.is_here else 50):
                with strategy.accumulate(model, sync=True):
                    strategy.backward(model(torch.randn(2, 4)).sum())
                step += 1
                time.sleep(STEP_S)


def make_rows(plant: Plant | None, rows: int = 64, pause_s: float = 0.0) -> Any:
    """Return rows to train on, in the reading of which a rank may hang."""
    import torch

    class Rows(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return rows

        def __getitem__(self, index: int) -> dict[str, Any]:
            if plant is not None:
                plant.reach("dataset")
            time.sleep(pause_s)
            return {"x": torch.full((8,), index / rows), "labels": torch.tensor(index % 3)}

    return Rows()


if __name__ == "__main__":
    sys.exit(main())
