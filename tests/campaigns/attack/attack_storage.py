"""Let every call on files fail, with every error that file systems give, for a moment and for good, on every rank.

Real runs, on one process, on two ranks of a loop by hand, and on two of the Trainer, new ones and resumed ones, saving
in the foreground and in the background. Each runs in a process whose calls go through failing_disk.c; where there is no
C compiler, only the operations on files are replaced. After each fault it is judged what is left, how the run
ended, and how the run ends that goes on from there.
"""

from __future__ import annotations

import json
import queue
import random
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import failing_disk
from attack_counts import HUNG, WRONG_END, Count, Options
from failing_disk import ALL, ERRORS, FOR_GOOD, SHORT, Aim

# The groups: how many faults, which stages begin with this, and whether operations in place of calls are struck.
GROUPS = (
    ("one process", 1000, "trainer, ", False),
    ("two ranks of a loop by hand", 1000, "two ranks, ", False),
    ("two ranks of the Trainer", 120, "trainers, ", False),
    ("operations, one process", 120, "trainer, ", True),
    ("operations, two ranks", 120, "two ranks, ", True),
)
WAYS = [f"{kind}{saves}" for saves in ("", ", asynchronous") for kind in ("new", "resumed")]
QUICK = 5  # of a quick attack, one fault in so many
TIMES = (1, 1, 3, FOR_GOOD)
ANSWER_LIMIT_S = 400.0


@dataclass(frozen=True)
class Fault:
    """One fault: the run, whose disk it is, and what happens to it."""

    stage: str
    rank: int
    aim: Aim


def attack(options: Options) -> Iterator[Count]:
    """Yield what came of the faults, by group."""
    library = failing_disk.compiled(options.folder)
    if library is None:
        print("  no C compiler, or no Linux: only the operations on files are replaced", flush=True)
    # In memory, where there is such a place: nothing of this is about a real disk.
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else options.folder) as place:
        workers = [Worker(Path(place) / str(number), library) for number in range(options.jobs)]
        try:
            for name, number, begins, of_files in GROUPS:
                if library is not None or of_files:
                    stages = [begins + way for way in WAYS]
                    number = number // QUICK if options.quick else number
                    faults = _faults(workers[0], stages, number, of_files, random.Random(options.seed))
                    yield _done(workers, f"storage: {name}", faults)
        finally:
            for worker in workers:
                worker.close()


class Worker:
    """A process that does attacks, started with the library in it."""

    def __init__(self, folder: Path, library: Path | None) -> None:
        folder.mkdir()
        command = [sys.executable, str(Path(__file__).with_name("storage_worker.py")), str(folder)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        self._process = subprocess.Popen(command, env=failing_disk.variables(library), **pipes)
        self._number = 0

    def ask(self, stage: str, *, of_files: bool, **more: Any) -> dict[str, Any]:
        """Have something done; the answer has an `error` if it could not be."""
        self._number += 1
        asked = {"stage": stage, "of_files": of_files, "number": self._number, **more}
        limit = threading.Timer(ANSWER_LIMIT_S, self._process.kill)
        limit.start()
        try:
            assert self._process.stdin is not None
            assert self._process.stdout is not None
            self._process.stdin.write(json.dumps(asked).encode() + b"\n")
            self._process.stdin.flush()
            return json.loads(self._process.stdout.readline() or b'{"error": "the worker ended", "ended": true}')
        except BrokenPipeError:
            return {"error": "the worker ended", "ended": True}
        finally:
            limit.cancel()

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.communicate()


def _faults(worker: Worker, stages: list[str], number: int, of_files: bool, drawn: random.Random) -> list[Fault]:
    """Return faults spread over the positions of all calls of each run, each with an error that such a call gives."""
    found: list[Fault] = []
    names, turn = list(ERRORS), 0
    for stage in stages:
        answer = worker.ask(stage, of_files=of_files)
        if "error" in answer:
            raise RuntimeError(f"{stage}: {answer['error']}")
        for rank, calls in enumerate(answer["calls"]):
            of_rank = max(1, number // len(stages) // len(answer["calls"]))
            positions = list(range(len(calls)))
            drawn.shuffle(positions)
            for position in (positions * (1 + of_rank // len(positions)))[:of_rank]:
                turn += 1
                found.append(Fault(stage, rank, _aim(calls, position, names, turn, of_files)))
    drawn.shuffle(found)
    return found


def _aim(calls: list[str], position: int, names: list[str], turn: int, of_files: bool) -> Aim:
    times, kind = TIMES[turn % len(TIMES)], calls[position]
    if of_files:
        return Aim(ALL, position + 1, times, names[turn % len(names)], of_files=True)
    if kind in ("read", "write") and turn % 7 == 0:
        return Aim(frozenset({kind}), _place(calls, position, {kind}), times, mode=SHORT)
    possible = [name for name in names if kind in ERRORS[name]]
    name = possible[turn % len(possible)]
    if name == "EINTR" and times == FOR_GOOD:  # a call is made again after each signal: it never is for good
        times = 3
    return Aim(ERRORS[name], _place(calls, position, ERRORS[name]), times, name)


def _place(calls: list[str], position: int, kinds: frozenset[str] | set[str]) -> int:
    return sum(call in kinds for call in calls[: position + 1])


def _done(workers: list[Worker], group: str, faults: list[Fault]) -> Count:
    count, waiting, lock = Count(group), queue.SimpleQueue(), threading.Lock()
    for fault in faults:
        waiting.put(fault)

    def work(worker: Worker) -> None:
        while True:
            try:
                fault = waiting.get_nowait()
            except queue.Empty:
                return
            aim = {**asdict(fault.aim), "kinds": sorted(fault.aim.kinds)}
            answer = worker.ask(fault.stage, of_files=fault.aim.of_files, rank=fault.rank, aim=aim)
            with lock:
                _note(count, fault, answer)
            if answer.get("ended"):
                return

    threads = [threading.Thread(target=work, args=(worker,)) for worker in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if not waiting.empty():
        count.wrong(HUNG, f"{waiting.qsize()} faults were not done: the workers ended")
    return count


def _note(count: Count, fault: Fault, answer: dict[str, Any]) -> None:
    if "error" in answer:
        count.tried += 1
        count.wrong(WRONG_END, f"{fault.stage}, rank {fault.rank}, {fault.aim}: {answer['error']}")
        return
    if not answer["tried"]:
        count.ends["did not strike"] += 1
        return
    count.tried += 1
    if answer["end"]:
        count.ends[answer["end"]] += 1
    for kind, text in answer["problems"]:
        count.wrong(kind, f"{fault.stage}, {text}")
