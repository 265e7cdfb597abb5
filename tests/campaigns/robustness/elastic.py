"""Let a job of two machines lose one and get another, and see that every row of the data was used once.

Two agents are started on this machine; one is killed with its rank, and when the job has gone on with the other, a
third is started, with which the job ends.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path

from rank_programs import RANK_RUN, TORCHRUN, TRAINER, Job, free_port
from runner import Case, Options
from sample_records import read_starts, rows_of_steps

ROWS = 160  # forty steps of two machines
LIMIT_S = 300
# Seconds that machines wait for others, and between their signs of life: with the defaults it takes minutes.
CONF = "last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=3"
SHARED_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"


def command_of(launcher: str, port: int, out: Path, strategy: str) -> list[object]:
    """Return the command line of each machine."""
    options = {
        "trainer launch": [*TRAINER, "--nproc", "1", "--nnodes", "1:2", "--max_restarts", "4"],
        "torchrun": [*TORCHRUN, "--nproc-per-node=1", "--nnodes=1:2", "--max-restarts=4", "--rdzv-backend=c10d"],
    }[launcher]
    place = ["--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "elastic", "--rdzv-conf", CONF]
    script = [RANK_RUN, out, "--rows", ROWS, "--step_s", "0.4", "--strategy", strategy]
    return [*options, *place, *script]


def resized(options: Options) -> Iterator[Case]:
    """Yield jobs that go from two machines to one and back."""
    for launcher, strategy in product(("trainer launch", "torchrun"), ("ddp", "fsdp")):
        label = f"{launcher}, {strategy}: 2 -> 1 -> 2 machines"
        yield Case(label, partial(_two_one_two, launcher, strategy))


def _two_one_two(launcher: str, strategy: str, root: Path) -> str:
    """Return what is wrong with a job that goes from two machines to one and back."""
    say = lambda text: print(f"  {text}", flush=True)  # noqa: E731
    out, port = root / "out", free_port()
    command = command_of(launcher, port, out, strategy)
    # torchrun needs to be told what `trainer launch` knows: else a start reads addresses of the one before.
    variables = {SHARED_STORE: "1"} if launcher == "torchrun" else {}
    with Job(root / "first") as first, Job(root / "second") as second, Job(root / "third") as third:
        first.start(command, **variables)
        wait_until(lambda: _listens(port), "the first machine to listen", first)
        second.start(command, **variables)
        wait_until(lambda: _steps(out, 2) >= 5, "five steps of two machines", first)
        _kill_all(second)
        say(f"machine killed after step {_last_step(out)}")
        wait_until(lambda: _steps(out, 1) >= 5, "five steps of one machine", first)
        third.start(command, **variables)
        say(f"machine added after step {_last_step(out)}")
        [end] = first.ends(LIMIT_S)
        [joined] = third.ends(30)
        left = [*first.left_over(), *second.left_over(), *third.left_over()]
    sizes = _sizes(out)
    say(f"starts of {', '.join(map(str, sizes))} rank(s)")
    wrong = [f"{len(left)} processes are left"] if left else []
    if end.code or joined.code:
        wrong.append(f"the machines ended with {end.code} and {joined.code}: {end.said[-2000:]}")
    if sizes[:1] != [2] or 1 not in sizes or sizes[-1] != 2:
        wrong.append(f"the job went on with {sizes} ranks")
    used = sorted(row for rows in rows_of_steps(out).values() for row in rows)
    if used != list(range(ROWS)):
        lost = sorted(set(range(ROWS)) - set(used))
        wrong.append(f"{len(used)} rows were used; lost {lost}, repeated {len(used) - len(set(used))}")
    return "; ".join(wrong)


def wait_until(is_so: Callable[[], bool], what: str, job: Job) -> None:
    """Return once it is so.

    Raises:
        TimeoutError: it did not become so, or the job ended before.
    """
    deadline = time.monotonic() + LIMIT_S
    while not is_so():
        ended = all(program.poll() is not None for program in job.programs)
        if ended or time.monotonic() > deadline:
            raise TimeoutError(f"waited for {what}, and {'the job ended' if ended else 'it never came'}: {job.said(0)}")
        time.sleep(0.05)


def _listens(port: int) -> bool:
    listening = f":{port:04X} "
    tables = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
    lines = [line for table in tables for line in table.read_text().splitlines()]
    return any(listening in line and " 0A " in line for line in lines)


def _kill_all(job: Job) -> None:
    """End a machine: all its processes at once."""
    for pid in job.running():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _steps(out: Path, world_size: int) -> int:
    """Return the steps of the newest start, if it has so many ranks."""
    starts = [start for start in read_starts(out) if start]
    if not starts or starts[-1][0]["world_size"] != world_size:
        return 0
    return sum("step" in each for each in starts[-1])


def _last_step(out: Path) -> int:
    return max((each["step"] for start in read_starts(out) for each in start if "step" in each), default=0)


def _sizes(out: Path) -> list[int]:
    """Return how many ranks each start had."""
    meetings = {start[0]["meeting"]: start[0]["world_size"] for start in read_starts(out) if start}
    return [meetings[meeting] for meeting in sorted(meetings)]
