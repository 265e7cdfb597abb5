"""Run a block in one process before the others, without a process group."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import shutil
import socket
import stat
import tempfile
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

POLL_S = 0.02
# How long a failing main process waits until the others have read its error.
GRACE_S = 5.0

_calls = itertools.count()


@dataclass(frozen=True)
class Meeting:
    """A folder in which processes meet; all of them can reach it.

    Every waiting process writes a request with a unique number, and continues only after the answer to that number.
    So files of an earlier, broken run are never mistaken for an answer.

    Attributes:
        folder: holds the requests (`want-RANK`), answers (`done-RANK-NUMBER`) and receipts
            (`seen-RANK-NUMBER`).
        size: number of processes that meet, the main one included.
        timeout_s: seconds after which a process gives up.
        desc: what the main process does, for messages.
    """

    folder: Path
    size: int
    timeout_s: float
    desc: str

    def wait(self, rank: int) -> None:
        """Wait until the main process is done.

        Raises:
            RuntimeError: the main process failed, with its error's text.
            TimeoutError: it did not answer in time.
        """
        number = uuid.uuid4().hex
        want, done = self.folder / f"want-{rank}", self.folder / f"done-{rank}-{number}"
        _write(want, number)
        deadline = time.monotonic() + self.timeout_s
        while not done.exists():
            if time.monotonic() > deadline:
                want.unlink(missing_ok=True)
                raise TimeoutError(
                    f"process {rank} waited {self.timeout_s:g} s for the main process to do {self.desc!r}; "
                    f"raise ddp_timeout if that takes longer, or find out why the main process never came "
                    f"(meeting at {self.folder})"
                )
            time.sleep(POLL_S)
        failure = json.loads(done.read_text())["failure"]
        _write(self.folder / f"seen-{rank}-{number}", number)
        if failure:
            raise RuntimeError(f"the main process failed in {self.desc!r}: {failure}")

    def answer(self, *, failure: str = "") -> None:
        """Answer every waiting process, wait until all have read it, and remove the folder.

        Args:
            failure: text of the main process's error; empty if it succeeded.

        Raises:
            TimeoutError: some process never came; not raised after a failure.
        """
        patience = min(self.timeout_s, GRACE_S) if failure else self.timeout_s
        deadline = time.monotonic() + patience
        absent = set(range(1, self.size))
        while absent:
            absent -= {rank for rank in absent if self._answer_one(rank, failure)}
            if absent and time.monotonic() > deadline:
                break
            time.sleep(POLL_S if absent else 0)
        if absent and not failure:
            raise TimeoutError(
                f"processes {sorted(absent)} did not come within {patience:g} s after the main process had "
                f"done {self.desc!r}; every process must reach the same main_process_first "
                f"(meeting at {self.folder})"
            )
        if not absent:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _answer_one(self, rank: int, failure: str) -> bool:
        """Answer the request of `rank`, if there is one, and return whether it has read the answer."""
        try:
            number = (self.folder / f"want-{rank}").read_text()
        except FileNotFoundError:
            return False
        done = self.folder / f"done-{rank}-{number}"
        if not done.exists():
            _write(done, json.dumps({"failure": failure}))
        return (self.folder / f"seen-{rank}-{number}").exists()


@contextlib.contextmanager
def first(rank: int, size: int, *, timeout_s: float, desc: str, shared: Path | None = None) -> Iterator[None]:
    """Run the body on rank 0, then on the others.

    Every process must enter it equally often. With one process it costs nothing.

    Args:
        rank: number of this process among those that meet; 0 is the main one.
        size: how many meet.
        timeout_s: seconds after which a process gives up.
        desc: what is done, for messages.
        shared: folder to meet in that all machines reach; None for processes of one machine.

    Raises:
        RuntimeError: (not on rank 0) the body failed on rank 0; or another user owns the folder to meet in.
        TimeoutError: the others did not come in time.
    """
    call = next(_calls)  # single processes count too: on another machine the same call may involve several
    if size == 1:
        yield
        return
    meeting = Meeting(_place(call, shared), size, timeout_s, desc)
    if rank != 0:
        meeting.wait(rank)
        yield
        return
    try:
        yield
    except BaseException as error:
        meeting.answer(failure=f"{type(error).__name__}: {error}")
        raise
    meeting.answer()


def _place(call: int, shared: Path | None) -> Path:
    """Return the folder for this process's `call`-th meeting, the same in all processes of one launch."""
    names = (
        "TORCHELASTIC_RUN_ID",
        "TORCHELASTIC_RESTART_COUNT",
        "MASTER_ADDR",
        "MASTER_PORT",
        "SLURM_JOB_ID",
    )
    launch = [os.environ.get(name, "") for name in names]
    if not any(launch):
        # Without a launcher's variables, the processes are children of one parent.
        launch.append(str(os.getppid()))
    if shared is None:
        launch.append(socket.gethostname())
    key = hashlib.sha256("\0".join(launch).encode()).hexdigest()[:16]
    user = getattr(os, "getuid", lambda: 0)()  # systems without it have a temporary folder for each user
    folder = (shared or Path(tempfile.gettempdir())) / f".tr-first-{user}-{key}-{call}"
    _make_own(folder)
    return folder


def _make_own(folder: Path) -> None:
    """Make a folder for this user alone. Its name can be guessed, so an existing one may be a trap.

    Raises:
        RuntimeError: the path is not a folder, or another user's.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = os.lstat(folder)
    if not stat.S_ISDIR(found.st_mode):
        problem = "it is a link" if stat.S_ISLNK(found.st_mode) else "it is not a folder"
    elif not hasattr(os, "geteuid") or not os.stat(folder.parent).st_mode & stat.S_IWOTH:
        return  # no other user can write to the parent, so the owner does not matter
    elif found.st_uid != os.geteuid():
        problem = f"it belongs to user {found.st_uid}, not to {os.geteuid()}"
    elif found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        problem = f"others may write to it (mode {stat.S_IMODE(found.st_mode):o})"
    else:
        return
    raise RuntimeError(
        f"processes cannot meet at {folder}: {problem}, so what they read there could be anybody's; remove it, or set "
        "TMPDIR to a folder of your own"
    )


def _write(path: Path, text: str) -> None:
    """Write a file atomically: readers find it absent or complete."""
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
    temporary.write_text(text)
    temporary.replace(path)
