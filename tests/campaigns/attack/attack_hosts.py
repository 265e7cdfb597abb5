"""Let two hosts save to one folder: processes with names of hosts of their own, of which none can ask for the other."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from hosts_worker import NO_NAMESPACES, Numbers
from runner import HUNG, LOST, WRONG_END, Case, Options, Tally

from tr_ckpt import Checkpointer

LIMIT_S = 300.0  # of one answer: a host is watched for more than a minute before it counts as gone
WORKER = Path(__file__).with_name("hosts_worker.py")


class Host:
    """A process on a host of its own, which saves the steps that it is asked for."""

    def __init__(self, name: str, folder: Path) -> None:
        command = [sys.executable, str(WORKER), name, str(folder)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self.first = self._answer()

    def __enter__(self) -> Host:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.process.communicate(timeout=60)

    def save(self, step: int) -> str:
        """Return what came of saving a step; empty if the process ended, or gave no answer in time."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{step}\n")
        self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> str:
        assert self.process.stdout is not None
        limit = threading.Timer(LIMIT_S, self.process.kill)
        limit.start()
        try:
            return self.process.stdout.readline().strip()
        finally:
            limit.cancel()


def cases(options: Options) -> Iterator[Case]:
    """Yield the courses."""
    with Host("anywhere", options.folder / "none") as host:
        if host.first != "ready" and host.process.wait(60) == NO_NAMESPACES:
            print("  no namespaces of names here: no other hosts", flush=True)
            return
    for name in ("alive",) if options.quick else COURSES:
        yield Case(name, partial(_run, COURSES[name]), f"hosts: {name}")


def _run(course: Callable[[Host, Host], list[tuple[str, str]]], folder: Path) -> Tally:
    tally, folder = Tally(1), folder / "run"
    with ExitStack() as stack:
        first, second = (stack.enter_context(Host(host, folder)) for host in ("first", "second"))
        answers = course(first, second)
    for given, right in answers:
        if not given:
            tally.wrong(HUNG, f"no answer; right is {right!r}, of {answers}")
        elif not given.startswith(right):
            tally.wrong(WRONG_END, f"{given!r}; right is {right!r}")
    saved = [int(text.removeprefix("saved ")) for text, _ in answers if text.startswith("saved ")]
    numbers, left = Numbers(), Checkpointer(folder).steps()
    if Checkpointer(folder).restore({"numbers": numbers}) != saved[-1] or not set(left) <= set(saved):
        tally.wrong(LOST, f"{left} are left, {saved} were saved, and step {numbers.step} is restored")
    if not tally.problems:
        tally.ends["one owner at a time"] += 1
    return tally


def _alive(first: Host, second: Host) -> list[tuple[str, str]]:
    """The other host lives, and keeps the folder."""
    return [
        (first.save(1), "saved 1"),
        (second.save(5), "refused: FolderInUseError"),
        (first.save(2), "saved 2"),
        (second.save(6), "refused: FolderInUseError"),
    ]


def _killed(first: Host, second: Host) -> list[tuple[str, str]]:
    """The other host dies, and the folder is taken over."""
    saved = first.save(1)
    first.process.kill()
    return [(saved, "saved 1"), (second.save(5), "saved 5"), (second.save(6), "saved 6")]


def _stopped(first: Host, second: Host) -> list[tuple[str, str]]:
    """The other host stands still for so long that it counts as gone; when it goes on, the folder is not its own."""
    saved = first.save(1)
    first.process.send_signal(signal.SIGSTOP)
    taken = second.save(5)
    first.process.send_signal(signal.SIGCONT)
    return [
        (saved, "saved 1"),
        (taken, "saved 5"),
        (first.save(2), "refused: FolderInUseError"),
        (second.save(6), "saved 6"),
    ]


COURSES = {"alive": _alive, "killed": _killed, "stopped for a while": _stopped}
