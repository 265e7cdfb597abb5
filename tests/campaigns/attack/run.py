"""Attack checkpoints, inputs and processes, and count what was lost, executed, written outside or ended wrongly."""

from __future__ import annotations

import contextlib
import gc
import importlib
import io
import os
import sys
from collections.abc import Iterable
from functools import partial
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "crash"))
sys.path.insert(0, str(Path(__file__).parents[1] / "robustness"))

import failing_disk
from runner import EXECUTED, HUNG, LOST, OUTSIDE, WRONG_END, Campaign, Case, Group, Options, main

# Each is a module `attack_NAME` beside this file, whose function `cases(options)` yields what is tried.
ATTACKS: dict[str, str] = {
    "storage": "every operation on files fails, for a moment and for good, on one process and on ranks",
    "schedules": "random read and write errors, kills and resumes, one after the other",
    "conditions": "quotas, full and slow disks, clocks that go back, process numbers used again, many shards",
    "files": "hostile checkpoints at every door, changed bytes in every parser, drawn names and states",
    "arguments": "hostile argument files and command lines",
    "pushes": "folders with links and private names at every depth are pushed to a Hub",
    "hosts": "two hosts, by namespaces of names, save to one folder",
    "signals": "signals at every phase, to every kind of process",
    "ranks": "a rank that raises, ends or is slow, in each place",
    "mutations": "checks taken out one at a time: an attack or a test must notice",
}
TRAINING = ("storage", "schedules", "conditions")  # which train in forks of this process
# What runs import when they need it: seconds, which every fork would take.
IMPORTED_LATE = ("torch._dynamo", "torch.distributed", "torch.nn.parallel", "tr_dist.ddp")


def prepare(options: Options) -> Options:
    """Have everything imported that forks of this process need."""
    if set(options.only or ATTACKS) & set(TRAINING):
        for module in IMPORTED_LATE:
            importlib.import_module(module)
        training = importlib.import_module("crash_training")
        training.torch.set_num_threads(1)
        with contextlib.redirect_stdout(io.StringIO()):
            training.train(options.folder / "warm")
        gc.collect()
        gc.freeze()  # forks share its memory for longer
    return options


def _cases(name: str, options: Options) -> Iterable[Case]:
    return importlib.import_module(f"attack_{name}").cases(options)


GROUPS = {name: Group(what, partial(_cases, name)) for name, what in ATTACKS.items()}

if __name__ == "__main__":
    failing_disk.preload()
    kinds = (LOST, EXECUTED, OUTSIDE, HUNG, WRONG_END)
    sys.exit(main(Campaign("attack", __doc__ or "", GROUPS, ("attacks", "problems"), kinds, prepare)))
