"""Report which rank failed first, with its traceback, and the exit code of the job."""

from __future__ import annotations

import json
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tr_dist.hangs import HANG_EXIT_CODE

# Messages of gloo, NCCL and torch on ranks that lost a peer.
CONSEQUENCES = (
    "closed by peer",
    "reset by peer",
    "Broken pipe",
    "Timed out waiting",
    "connectFullMesh",
    "remote process exited",
    "lost its connection to rank 0",
    "could not connect to the others",
    "has ended, and rank",  # shared_page.py
)
_LAST_LINES = 30


@dataclass(frozen=True)
class Ending:
    """How one process ended.

    Attributes:
        rank: its number among all.
        code: its exit code as in Python, negative for a signal; None if it was still running.
        message: the exception that ended it; empty if none was recorded.
        traceback: that exception's.
        time_s: the time of the exception, in seconds since the epoch.
    """

    rank: int
    code: int | None
    message: str = ""
    traceback: str = ""
    time_s: float = 0.0

    @property
    def is_consequence(self) -> bool:
        """Whether it ended because another process had ended."""
        return any(words in self.traceback for words in CONSEQUENCES)

    def __str__(self) -> str:
        said = f": {self.message.splitlines()[0]}" if self.message else ""
        return f"rank {self.rank} {_manner(self.code)}{said}"


def read_ending(rank: int, code: int | None, error_file: Path) -> Ending:
    """Return how a rank ended, with the exception that it recorded."""
    try:
        note = json.loads(error_file.read_text("utf-8"))
        return Ending(rank, code, note["message"], note["traceback"], note["time_s"])
    except (OSError, ValueError, KeyError):
        return Ending(rank, code)


def first_cause(endings: list[Ending]) -> Ending:
    """Return the ending that caused the others.

    A hang comes first, then an exception of its own, a signal, an exit code. If all failed ranks lost a connection, it
    is a rank that had ended with exit code 0. Among ranks with the same exception, the lowest number comes first.

    Args:
        endings: of the processes that ended by themselves, at least one.
    """
    hung = [ending for ending in endings if ending.code == HANG_EXIT_CODE]
    if hung:  # the hang watch may have killed others
        return min(hung, key=lambda ending: ending.rank)
    own = [ending for ending in endings if ending.message and not ending.is_consequence]
    if own:
        earliest = min(own, key=lambda ending: ending.time_s)
        return min((ending for ending in own if ending.message == earliest.message), key=lambda ending: ending.rank)
    silent = [ending for ending in endings if not ending.message and ending.code != 0]
    if silent:
        return min(silent, key=lambda ending: ((ending.code or 0) >= 0, ending.rank))
    lost = [ending for ending in endings if ending.message]
    done = [ending for ending in endings if ending.code == 0]
    return done[0] if lost and done else min(lost or endings, key=lambda ending: ending.time_s)


def exit_code(code: int | None) -> int:
    """Return a process's exit code as in a shell: 128 + the number of a signal that ended it."""
    if code is None:
        return 1
    return 128 - code if code < 0 else code


def describe(endings: list[Ending], *, world_size: int, nodes: int, logs: Mapping[int, Path]) -> str:
    """Return the report about a failed job: the first cause, its traceback or last lines, and then the others.

    Args:
        endings: of the processes of this machine that ended by themselves.
        world_size: number of processes in the job.
        nodes: number of machines.
        logs: the log files of the ranks.
    """
    cause = first_cause(endings)
    if cause.code == 0 and any(ending.message for ending in endings):
        return _left_early(cause, endings, world_size)
    lines = [f"rank {cause.rank} of {world_size} failed first: it {_manner(cause.code)}"]
    if cause.traceback:
        lines.append(cause.traceback.rstrip())
    elif cause.rank in logs:
        lines += [f"the end of {logs[cause.rank]}:", *_last_lines(logs[cause.rank])]
    if cause.code is not None and cause.code < 0:
        lines.append(_about_signal(-cause.code))
    if cause.is_consequence and nodes > 1:
        lines.append("it lost its connection to a rank on another machine; that machine's output says why")
    alike = [ending for ending in endings if cause.message and ending.message == cause.message]
    if len(alike) > 1:
        lines.append("the same on rank " + ", ".join(str(rank) for rank in sorted(e.rank for e in alike)[1:]))
    others = [ending for ending in endings if ending.code != 0 and ending not in alike and ending.rank != cause.rank]
    lines += [f"then {ending}" for ending in sorted(others, key=lambda ending: ending.time_s)]
    return "\n".join(lines)


def _left_early(cause: Ending, endings: list[Ending], world_size: int) -> str:
    lost = min((ending for ending in endings if ending.message), key=lambda ending: ending.time_s)
    return (
        f"rank {cause.rank} of {world_size} ended first, with exit code 0, and then {lost} — a script must end all "
        f"ranks at the same step: sys.exit ends one\n{lost.traceback.rstrip()}"
    )


def _manner(code: int | None) -> str:
    if code is None:
        return "was still running"
    if code < 0:
        return f"was ended by {_signal_name(-code)}"
    why = " because ranks hung, as the hang watch says above" if code == HANG_EXIT_CODE else ""
    return f"ended with exit code {code}{why}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _about_signal(number: int) -> str:
    name = _signal_name(number)
    if name == "SIGKILL":
        return (
            "SIGKILL comes from outside; without anybody who sent it, the system was out of memory (dmesg says so): "
            "start fewer processes here, or give each less to hold"
        )
    if name in ("SIGSEGV", "SIGBUS", "SIGABRT"):
        return f"{name} comes from compiled code; PYTHONFAULTHANDLER=1 in the environment prints where Python was then"
    return f"{name} is a request to stop that this process did not get from the launcher"


def _last_lines(path: Path) -> list[str]:
    try:
        return path.read_text("utf-8", errors="replace").splitlines()[-_LAST_LINES:]
    except OSError as error:
        return [f"(cannot be read: {error})"]
