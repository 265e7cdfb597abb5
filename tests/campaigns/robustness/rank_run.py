"""Be one rank of a job: train a little, fail where and how it is asked for, and end as a script does.

Usage: rank_run.py OUT [OPTION ...]. What is in this folder starts it, by every launcher.

A failure strikes once in a job, in one rank, when that rank comes to a place for the n-th time: OUT/struck notes when.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from two_blocks import make_network

PLACES = (
    "begin", "dataset", "forward", "backward", "exchanged", "step", "log", "evaluation", "file", "file done", "saved",
    "end",
)  # fmt: skip


def main() -> None:
    """Train as the command line says."""
    options = read_options()
    import torch

    torch.set_num_threads(1)
    (train_by_own_loop if options.loop == "own" else train)(options)


def read_options() -> argparse.Namespace:
    """Return what the command line says."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--loop", choices=("own", "trainer"), default="trainer")
    parser.add_argument("--strategy", choices=("ddp", "fsdp"), default="ddp")
    parser.add_argument("--close", action="store_true", help="leave the group before the interpreter does")
    parser.add_argument("--as_torch_does", action="store_true", help="destroy the group and settle nothing")
    parser.add_argument("--place", choices=PLACES)
    parser.add_argument("--times", type=int, default=1)
    parser.add_argument("--how", choices=("raise", "exit", "sys.exit", "kill", "tear", "abort"), default="raise")
    parser.add_argument("--rank", type=int, default=1, help="the rank that fails")
    parser.add_argument("--rows", type=int, default=24, help="of the training data, of which a rank takes two a step")
    parser.add_argument("--dropout", type=float, default=0.2)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--step_s", type=float, default=0.0)
    parser.add_argument("--arguments", type=json.loads, default={}, help="further training arguments")
    return parser.parse_args()


class Fault:
    """Counts the places that this rank reaches, and strikes at one."""

    def __init__(self, options: argparse.Namespace, rank: int) -> None:
        self.options, self.rank = options, rank
        self._place = options.place if rank == options.rank else None
        self._reached: Counter[str] = Counter()
        self.before_death: Callable[[], object] = int  # nothing

    def reach(self, place: str) -> None:
        """Fail if this is where."""
        self._reached[place] += 1
        if place != self._place or self._reached[place] != self.options.times:
            return
        self.options.out.mkdir(parents=True, exist_ok=True)
        try:
            note = os.open(self.options.out / "struck", os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        except FileExistsError:
            return  # in an earlier start of the job
        os.write(note, repr(time.time()).encode())
        how = self.options.how
        if how == "exit":
            os._exit(3)
        if how == "sys.exit":
            sys.exit(5)
        if how in ("kill", "tear", "abort"):
            self.before_death()
            os.kill(os.getpid(), signal.SIGABRT if how == "abort" else signal.SIGKILL)
        raise ArithmeticError(f"rank {self.rank} fails: {place}")


def train_by_own_loop(options: argparse.Namespace) -> None:
    """Train by a loop of one's own, with nothing but tr_dist."""
    import torch

    from tr_dist import DDP
    from tr_dist.fsdp import FSDP

    strategy = {"ddp": DDP, "fsdp": FSDP}[options.strategy](use_cpu=True)
    fault = Fault(options, strategy.rank)
    torch.manual_seed(0)
    model = strategy.prepare(torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(4)]))
    for _ in range(10):
        with strategy.accumulate(model, sync=True):
            loss = model(torch.randn(8, 64)).pow(2).mean()
            fault.reach("forward")
            strategy.backward(loss)
        fault.reach("exchanged")
        for parameter in model.parameters():
            parameter.data.add_(parameter.grad, alpha=-0.1)
            parameter.grad = None
    leave(options, strategy)
    del model  # and with it what torch keeps beside the model, right after the last exchange


def train(options: argparse.Namespace) -> None:
    """Train by the Trainer, from the newest checkpoint if there is one."""
    from tr_core import Trainer, TrainingArguments

    fault = Fault(options, int(os.environ.get("RANK", "0")))
    record = Record(options.out)
    sharded = {"fsdp": "full_shard", "fsdp_config": {"transformer_layer_cls_to_wrap": ["Block"]}}
    chosen = {"ddp": {"strategy": "ddp", "ddp_bucket_cap_mb": 1}, "fsdp": sharded}[options.strategy]
    settings = {
        "output_dir": str(options.out / "run"),
        "per_device_train_batch_size": 2,
        "num_train_epochs": 1,
        "learning_rate": 1e-2,
        "logging_steps": 2,
        "eval_strategy": "steps",
        "eval_steps": 3,
        "save_steps": 2,
        "save_total_limit": 2,
        "disable_tqdm": True,
        "log_level": "error",
        "use_cpu": True,
        "dataloader_num_workers": options.workers,
        "resume_from_checkpoint": "auto",
        **chosen,
        **options.arguments,
    }
    watch = make_watch(fault, record, options.step_s)
    trainer = Trainer(
        make_network(fault.reach, options.dropout, lambda numbers: record.rows.extend(numbers)),
        TrainingArguments(**settings),
        train_dataset=make_rows(options.rows, fault),
        eval_dataset=make_rows(4),
        callbacks=[watch],
        compute_metrics=lambda prediction: fault.reach("evaluation") or {"rows": len(prediction.predictions)},
    )
    watch.gather = trainer.strategy.gather_objects
    break_files(fault, record)
    trainer.train()
    weights = trainer.strategy.full_state_dict(trainer.model_wrapped)
    if trainer.is_world_process_zero():
        record.end(trainer, weights)
    fault.reach("end")
    leave(options, trainer.strategy)


def leave(options: argparse.Namespace, strategy: Any) -> None:
    """Leave the group, or leave that to what is called when the interpreter ends."""
    if options.as_torch_does:
        import torch.distributed as dist

        from tr_dist.testing import abandon_group

        abandon_group()
        dist.destroy_process_group()
    elif options.close:
        strategy.close()


def make_rows(count: int, fault: Fault | None = None) -> Any:
    """Return so many rows, each of which holds its number."""
    import torch

    class Rows(torch.utils.data.Dataset):
        def __init__(self) -> None:
            generator = torch.Generator().manual_seed(0)
            self.x = torch.randn(count, 8, generator=generator)

        def __len__(self) -> int:
            return count

        def __getitem__(self, index: int) -> dict[str, Any]:
            if fault is not None:
                fault.reach("dataset")
            return {"x": self.x[index], "labels": torch.tensor(index % 3), "number": torch.tensor(index)}

    return Rows()


def make_watch(fault: Fault, record: Record, step_s: float) -> Any:
    """Return a callback that tells where the loop is, and notes which rows each step used; `gather` is to be set."""
    from tr_core import TrainerCallback

    class Watch(TrainerCallback):
        gather: Callable[[Any], list[Any]]

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            record.begin(state.global_step, self.gather)
            fault.reach("begin")

        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            fault.reach("exchanged")

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            record.step(state.global_step)
            time.sleep(step_s)
            fault.reach("step")

        def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            fault.reach("log")

        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            fault.reach("saved")

    return Watch()


def break_files(fault: Fault, record: Record) -> None:
    """Have every operation of a save on files be a place: before it, or with `--how tear` in the middle of a write."""
    from disk import path_of, replace_every_operation, write_half

    def reach(name: str, operation: Any, arguments: tuple[Any, ...]) -> Any:
        record.operation(name, path_of(arguments[0]))
        if fault.options.how == "tear" and name == "write":
            fault.before_death = lambda: write_half(arguments)
        fault.reach("file")
        result = operation(*arguments)
        fault.reach("file done")
        return result

    replace_every_operation(reach)


class Record:
    """Writes which rows each step used, of this rank in this start, and what the run ends with."""

    def __init__(self, out: Path) -> None:
        self.out, self.rows = out, []
        self._file = -1
        self._earlier: list[dict[str, Any]] = []

    def begin(self, step: int, gather: Callable[[Any], list[Any]]) -> None:
        """Begin a file of this start, named by when its ranks met."""
        meetings = gather(time.time_ns())
        rank = int(os.environ.get("RANK", "0"))
        self.out.mkdir(parents=True, exist_ok=True)
        path = self.out / f"used-{meetings[0]}-{rank}.jsonl"
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._write(begin=step, meeting=meetings[0], world_size=len(meetings))
        for facts in self._earlier:
            self._write(**facts)

    def step(self, step: int) -> None:
        """Note what was used since the last step."""
        self._write(step=step, rows=self.rows)
        self.rows = []

    def operation(self, name: str, path: str) -> None:
        """Note an operation on files; those before the first step, as of the folder's lock, when it begins."""
        facts = {"operation": name, "path": path}
        if self._file == -1:
            self._earlier.append(facts)
        else:
            self._write(**facts)

    def end(self, trainer: Any, weights: dict[str, Any]) -> None:
        """Note a digest of the weights, and what was logged."""
        digest = hashlib.sha256()
        for name in sorted(weights):
            digest.update(weights[name].detach().cpu().numpy().tobytes())
        history = [
            {name: value for name, value in entry.items() if not name.endswith(("_runtime", "_per_second"))}
            for entry in trainer.state.log_history
            if "train_loss" not in entry
        ]
        end = {"weights": digest.hexdigest(), "history": history, "steps": trainer.state.global_step}
        (self.out / "end.json").write_text(json.dumps(end))

    def _write(self, **facts: Any) -> None:
        os.write(self._file, (json.dumps(facts) + "\n").encode())


if __name__ == "__main__":
    main()
