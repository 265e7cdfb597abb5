"""Compile the disk that fails, have it preloaded, and aim it.

After `preload` a process has the library in it, and so have its forks. Nothing fails until one of them has called
`aim`, which is for that process alone.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

# In the order of the enumeration in failing_disk.c.
KINDS = (
    "open", "read", "write", "sync", "rename", "remove", "make_folder", "remove_folder", "link", "look", "list", "cut",
    "map", "create",
)  # fmt: skip
ALL = frozenset(KINDS)
_SPACE = frozenset({"create", "write", "sync", "make_folder", "rename", "link"})
_NAMES = frozenset({"create", "rename", "remove", "make_folder", "remove_folder", "link"})
_SLOW = frozenset({"open", "create", "read", "write"})

# Which calls each error is given by, on one file system or another.
ERRORS: dict[str, frozenset[str]] = {
    "EIO": ALL,
    "ESTALE": ALL,
    "ETIMEDOUT": ALL,
    "ENOSPC": _SPACE,
    "EDQUOT": _SPACE,
    "EACCES": _NAMES | {"open", "look", "list"},
    "EPERM": _NAMES,
    "EROFS": _NAMES | {"write"},
    "EINTR": _SLOW | {"sync"},
    "EAGAIN": _SLOW,
    "EMFILE": frozenset({"open", "create", "list"}),
    "ENOMEM": frozenset({"open", "create", "read", "list", "look", "map", "make_folder"}),
    "EINVAL": frozenset({"sync"}),
    "EXDEV": frozenset({"rename", "link"}),
    "EEXIST": frozenset({"create", "make_folder", "rename", "link"}),
    "ENOTEMPTY": frozenset({"rename", "remove_folder"}),
    "ENOENT": _NAMES,
}

FAIL, WAIT, SHORT, QUOTA = range(4)
FOR_GOOD = -1

COMPILE_LIMIT_S = 60


@dataclass(frozen=True)
class Aim:
    """What is to happen to which calls.

    Attributes:
        kinds: of the calls that are counted.
        at: number of the first that is struck, from 1; 0 strikes none.
        times: how many are struck from there on; `FOR_GOOD` for all.
        error: name of the error.
        mode: `FAIL` gives the error, `WAIT` waits `value` microseconds, `SHORT` does half of what was asked for,
            `QUOTA` gives the error once `value` bytes have been written.
        value: see there.
        of_files: whether operations on files are meant, and not calls of the system.
    """

    kinds: frozenset[str] = ALL
    at: int = 0
    times: int = 1
    error: str = "EIO"
    mode: int = FAIL
    value: int = 0
    of_files: bool = False

    def __str__(self) -> str:
        how = {FAIL: self.error, WAIT: f"a wait of {self.value} us", SHORT: "half"}.get(
            self.mode, f"quota {self.value}"
        )
        kinds = "any call" if self.kinds == ALL else "/".join(sorted(self.kinds))
        return f"{how} at {kinds} number {self.at}, {'for good' if self.times < 0 else f'{self.times} times'}"


def compiled(folder: Path) -> Path | None:
    """Compile the library into `folder`; None where there is no Linux or no compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None or sys.platform != "linux":
        return None
    made = folder / "failing_disk.so"
    source = Path(__file__).with_name("failing_disk.c")
    command = [compiler, "-O1", "-fPIC", "-shared", "-o", str(made), str(source), "-ldl"]
    subprocess.run(command, check=True, timeout=COMPILE_LIMIT_S)
    return made


def preload() -> None:
    """Start this program again with the library in it, but not in what it starts; where there is none, go on."""
    if is_here():
        Path(os.environ.pop("LD_PRELOAD")).unlink()
        return
    with tempfile.TemporaryDirectory() as folder:
        if (made := compiled(Path(folder))) is None:
            print("  no C compiler, or no Linux: only operations on files are replaced; no quotas, slow disks, clocks")
            return
        library = shutil.copy(made, tempfile.mkstemp(suffix=".so")[1])
    os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "LD_PRELOAD": library})


def is_here() -> bool:
    """Whether this process has the library in it."""
    return hasattr(ctypes.CDLL(None), "failing_disk_aim")


def aim(folder: Path, aim: Aim) -> None:
    """Have the calls of this process on what is below `folder` struck; syncs return at once from here on."""
    mask = sum(1 << KINDS.index(kind) for kind in aim.kinds)
    code = getattr(errno, aim.error)
    at = aim.at or 2**60
    library = ctypes.CDLL(None)
    library.failing_disk_without_sync(1)
    library.failing_disk_aim(
        os.fsencode(folder), ctypes.c_uint(mask), ctypes.c_long(at), ctypes.c_long(aim.times), code, aim.mode,
        ctypes.c_long(aim.value),
    )  # fmt: skip


def calls() -> list[str]:
    """Return the kinds of the calls that were counted since `aim`, in order."""
    room = ctypes.create_string_buffer(1 << 18)
    number = ctypes.CDLL(None).failing_disk_kinds(room, ctypes.c_long(1 << 18))
    return [KINDS[kind] for kind in room.raw[:number]]


def struck() -> tuple[int, str]:
    """Return how many calls were struck, and what the first of them was and on what."""
    library = ctypes.CDLL(None)
    library.failing_disk_where.restype = ctypes.c_char_p
    kind, _, path = os.fsdecode(library.failing_disk_where()).partition(" ")
    return library.failing_disk_struck(), f"{KINDS[int(kind)]} {path}" if kind else ""


def set_clock(seconds: int, turn: int = 0) -> None:
    """Put this process's clock off, or off by turns of so many calls."""
    ctypes.CDLL(None).failing_disk_clock(ctypes.c_long(seconds), ctypes.c_long(turn))
