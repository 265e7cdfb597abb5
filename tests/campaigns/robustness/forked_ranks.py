"""Fork ranks from an interpreter that has everything imported, each of which ends as an interpreter does.

Reads jobs from stdin, a line of JSON each, and answers each with a line: how its ranks ended. A rank goes on where this
file ends: it runs `main()` of a program, `rank_run.py` if no other is named, as a script does, its exceptions are
printed by the interpreter, its exit handlers run, threads meet the end of the interpreter, static objects of libraries
are destroyed. Only its imports were made before.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

_IMPORTED_BY_RUNS = (
    "torch._dynamo", "torch.distributed.fsdp", "torch.nn.parallel", "tr_ckpt", "tr_core.trainer", "tr_dist.ddp",
    "tr_dist.fsdp",
)  # fmt: skip
_POLL_S = 0.01
_TELL_S = 1.0  # for a rank that does not end, to say where it is


def serve() -> dict[str, Any] | None:
    """Do jobs until there are no more: None then, and in a rank what it is to be."""
    # Without a buffer, which a fork would have with what it holds.
    for line in open(0, "rb", buffering=0, closefd=False):  # noqa: SIM115
        job = json.loads(line)
        pids: list[int] = []
        for rank in job["ranks"]:
            pids.append(os.fork())
            if pids[-1] == 0:
                return rank
        print(json.dumps(_wait(pids, job["limit_s"])), flush=True)
    return None


def _wait(pids: list[int], limit_s: float) -> list[tuple[int | None, float]]:
    """Return exit code and time of each, None for one that had to be killed."""
    ends: dict[int, tuple[int | None, float]] = {}
    deadline = time.monotonic() + limit_s
    while len(ends) < len(pids):
        is_over = time.monotonic() > deadline
        for pid in pids:
            if pid in ends:
                continue
            if is_over:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGUSR2)
                    time.sleep(_TELL_S)
                    os.killpg(pid, signal.SIGKILL)
            done, status = os.waitpid(pid, 0 if is_over else os.WNOHANG)
            if done:
                ends[pid] = (None if is_over else os.waitstatus_to_exitcode(status), time.time())
        time.sleep(_POLL_S)
    return [ends[pid] for pid in pids]


def become(rank: dict[str, Any]) -> None:
    """Take the variables, the arguments and the files of a program."""
    os.setsid()
    said = os.open(rank["said"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (said, 1), (said, 2)):
        os.dup2(source, target)
    faulthandler.register(signal.SIGUSR2, file=2)
    os.environ.update(rank["variables"])
    sys.argv[:] = [program.__name__, *rank["arguments"]]


_PATH = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_name("rank_run.py")
sys.path.insert(0, str(_PATH.parent))
program = importlib.import_module(_PATH.stem)
for name in _IMPORTED_BY_RUNS:
    importlib.import_module(name)
torch.set_num_threads(1)
gc.collect()
gc.freeze()  # ranks share its memory with it for longer
print("ready", flush=True)
if (rank := serve()) is not None:
    become(rank)
    program.main()
