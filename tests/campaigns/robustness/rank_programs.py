"""Start the ranks of a job as programs of their own, wait for them, and look for what they leave running."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import runner
from children import place_of

RANK_RUN = Path(__file__).parent / "rank_run.py"
FORKED_RANKS = Path(__file__).parent / "forked_ranks.py"
TRAINER = (str(Path(sys.executable).parent / "trainer"), "launch")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
MARK = "TR_ROBUSTNESS_JOB"  # a variable that all processes of a job inherit
_POLL_S = 0.02
_LAUNCHERS = ("TORCHELASTIC", "ACCELERATE", "FSDP_", "MASTER_", "SLURM_")
_PLACES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "TR_RENDEZVOUS_FILE")


@dataclass(frozen=True)
class End:
    """How a program ended.

    Attributes:
        code: its exit code as Python gives it, negative for a signal; None if it was killed for not ending.
        said: what it wrote to stdout and stderr.
        time_s: when that was seen, in seconds since the epoch.
    """

    code: int | None
    said: str
    time_s: float


class Job:
    """Programs that are started together, each with a file for what it says; all are killed at the end.

    Args:
        folder: an empty or new folder for these files.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.mark = uuid.uuid4().hex
        self.programs: list[subprocess.Popen[bytes]] = []
        folder.mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *error: object) -> None:
        for pid in self.running():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for program in self.programs:
            program.wait()

    def start(self, command: Iterable[object], **variables: str) -> subprocess.Popen[bytes]:
        """Start a program in a session of its own."""
        with open(self.folder / f"program-{len(self.programs)}.txt", "wb") as said:
            program = subprocess.Popen(
                [str(word) for word in command],
                env={**surroundings(), **variables, MARK: self.mark},
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.programs.append(program)
        return program

    def start_ranks(self, world_size: int, arguments: Sequence[object]) -> None:
        """Start every rank by hand, with the variables of a launcher; they meet through a file."""
        for rank in range(world_size):
            self.start([sys.executable, RANK_RUN, *arguments], **place_of(rank, world_size, self.folder / "meet"))

    def said(self, number: int) -> str:
        """Return what a program has said so far."""
        return (self.folder / f"program-{number}.txt").read_text("utf-8", errors="replace")

    def ends(self, limit_s: float) -> list[End]:
        """Wait for all programs, and return how they ended, in the order in which they were started."""
        deadline, times = time.monotonic() + limit_s, [0.0] * len(self.programs)
        while time.monotonic() < deadline and not all(times):
            for number, program in enumerate(self.programs):
                if not times[number] and program.poll() is not None:
                    times[number] = time.time()
            time.sleep(_POLL_S)
        codes = [program.poll() for program in self.programs]
        return [
            End(code, self.said(number), times[number] or time.time()) for number, code in enumerate(codes)
        ]  # fmt: skip

    def running(self) -> list[int]:
        """Return the ids of all processes of the job that are there now, whoever started them."""
        return marked(self.mark)

    def left_over(self, within_s: float = 5.0) -> list[int]:
        """Return what still runs after some seconds."""
        return _wait_for_end(self.running, within_s)


class Nursery:
    """An interpreter that has everything imported, of which ranks are forked: see `forked_ranks.py`.

    Args:
        program: the file whose `main` they run.
    """

    def __init__(self, program: Path = RANK_RUN) -> None:
        self._mark = uuid.uuid4().hex
        self._program = subprocess.Popen(
            [sys.executable, str(FORKED_RANKS), str(program)],
            env={**surroundings(), MARK: self._mark},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._read()  # that it is ready

    def __enter__(self) -> Nursery:
        return self

    def __exit__(self, *error: object) -> None:
        for pid in self.running():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._program.communicate()

    def run(self, world_size: int, arguments: Sequence[object], folder: Path, limit_s: float) -> list[End]:
        """Let ranks run, and return how they ended; each with what all of them said, in the order of a terminal.

        Args:
            world_size: how many they are.
            arguments: of the program.
            folder: an empty or new folder for what they say.
            limit_s: seconds after which they are killed.
        """
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / "said.txt"
        words = [str(word) for word in arguments]
        ranks = [
            {"variables": place_of(rank, world_size, folder / "meet"), "arguments": words, "said": str(file)}
            for rank in range(world_size)
        ]
        assert self._program.stdin is not None
        self._program.stdin.write(json.dumps({"ranks": ranks, "limit_s": limit_s}) + "\n")
        self._program.stdin.flush()
        ends = json.loads(self._read())
        said = file.read_text("utf-8", errors="replace") if file.exists() else ""
        return [End(code, said, time_s) for code, time_s in ends]

    def running(self) -> list[int]:
        """Return the ids of it and of all that came of it."""
        return marked(self._mark)

    def left_over(self, within_s: float = 5.0) -> list[int]:
        """Return what still runs of ranks after some seconds."""
        return _wait_for_end(lambda: [pid for pid in self.running() if pid != self._program.pid], within_s)

    def _read(self) -> str:
        assert self._program.stdout is not None
        line = self._program.stdout.readline()
        if not line:
            raise RuntimeError(f"the interpreter that ranks are forked of ended with {self._program.wait()}")
        return line


def nursery(program: Path = RANK_RUN) -> Nursery:
    """Return the nursery of this process, which ends when that has done its cases."""
    return _nursery(program, os.getpid())


@cache
def _nursery(program: Path, pid: int) -> Nursery:
    made = Nursery(program)
    runner.at_end.append(made.__exit__)
    return made


def marked(mark: str) -> list[int]:
    """Return the ids of all processes that were started with this mark, or are forks of such."""
    wanted, found = f"{MARK}={mark}".encode(), []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            with contextlib.suppress(OSError):
                is_dead = (folder / "stat").read_text().rpartition(")")[2].split()[0] in ("Z", "X")
                if not is_dead and wanted in (folder / "environ").read_bytes().split(b"\0"):
                    found.append(int(folder.name))
    return found


def _wait_for_end(find: Callable[[], list[int]], within_s: float) -> list[int]:
    deadline = time.monotonic() + within_s
    while (found := find()) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    return found


def surroundings() -> dict[str, str]:
    """Return the variables of this process without those of a launcher that it may itself run under."""
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(_LAUNCHERS) and name not in _PLACES
    }
    return {**kept, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONUNBUFFERED": "1"}


def free_port() -> int:
    """Return a port that nobody listens on now."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]
