"""See from another thread where a process is: in which exchange between ranks, and in whose code."""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import sys
import sysconfig
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
import torch.distributed as dist

from tr_log import slow_work

_LIBRARY = tuple({sysconfig.get_path("stdlib") + os.sep, sysconfig.get_path("platstdlib") + os.sep})
_INSTALLED = tuple({sysconfig.get_path("purelib") + os.sep, sysconfig.get_path("platlib") + os.sep})
_TORCH = str(Path(torch.__file__).parent) + os.sep
_OWN = str(Path(__file__).parent.parent) + os.sep
_EXCHANGES = tuple(
    _TORCH + os.path.join("distributed", name) for name in ("distributed_c10d.py", "_functional_collectives.py")
)
_BACKWARD = os.path.join(_TORCH, "autograd", "graph.py")
_LOADING = (os.path.join(_TORCH, "utils", "data", ""), os.sep + os.path.join("tr_core", "data", ""))
_DEBUGGERS = ("bdb.py", "pdb.py", "pydevd.py", "debugpy")
names_of_exchanges: dict[str, Callable[[CodeType], str]] = {}
"""By file: names the exchange that the file's innermost running code makes. A file with exchanges enters itself."""
BACKWARD = "backward"
"""The name of a backward pass, in which gradients are exchanged by compiled code."""


@dataclass(frozen=True)
class Place:
    """Where a thread is.

    Attributes:
        exchange: the exchange between ranks that it is in, such as `all_reduce`; `backward` for a backward pass, which
            exchanges gradients; empty in neither.
        where: function, file and line outside torch and the standard library.
        is_loading: whether it loads data.
        is_debugged: whether a debugger holds it.
    """

    exchange: str = ""
    where: str = ""
    is_loading: bool = False
    is_debugged: bool = False


def place_of(frame: FrameType | None) -> Place:
    """Return where a thread is whose innermost frame is given."""
    codes: list[tuple[CodeType, int]] = []
    while frame is not None:
        codes.append((frame.f_code, frame.f_lineno))
        frame = frame.f_back
    files = [code.co_filename for code, _ in codes]
    exchange = _exchange([code for code, _ in codes if not _is_library(code.co_filename)])
    skips = (_TORCH, _OWN) if exchange else (_TORCH,)
    outside = [(code, line) for code, line in codes if not _is_library(code.co_filename, skips)]
    code, line = (outside or codes or [(None, 0)])[0]
    return Place(
        exchange=exchange,
        where="" if code is None else f"{_function(code)} at {_short(code.co_filename)}:{line}",
        is_loading=any(part in file for file in files for part in _LOADING),
        is_debugged=any(
            file.endswith(name) or f"{os.sep}{name}{os.sep}" in file for file in files for name in _DEBUGGERS
        ),
    )


def _frames() -> dict[int, FrameType]:
    """Return the frame that each thread of this process is in, by the thread's identifier.

    Python makes objects of frames while it holds the lock of all threads. A collection of garbage in between may run
    what starts a thread, as the end of a loader's workers does, and the whole process would wait for that lock (Python
    3.11; https://github.com/python/cpython/issues/106883).
    """
    is_collecting = gc.isenabled()
    gc.disable()
    try:
        return sys._current_frames()
    finally:
        if is_collecting:
            gc.enable()


def own_place() -> Place:
    """Return where the main thread of this process is, or the thread that works for it while ranks wait."""
    frames, waiting = _frames(), slow_work.current
    thread = None if waiting is None else waiting.thread
    if thread in frames:
        return replace(place_of(frames[thread]), exchange="")
    place = place_of(frames.get(threading.main_thread().ident or 0))
    return place if waiting is None else replace(place, exchange="gather_objects")


def own_stacks() -> str:
    """Return the Python stacks of the threads of this process, the main thread's first, without the calling one."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    frames = {ident: frame for ident, frame in _frames().items() if ident != threading.get_ident()}
    found = []
    for ident in sorted(frames, key=lambda ident: ident != main):
        found.append(f"thread {names.get(ident, ident)}:\n" + "".join(traceback.format_stack(frames[ident])))
    return "\n".join(found)


def exchange_counts() -> dict[str, int]:
    """Return how many exchanges this process has started in each of its groups, by the group's name and device."""
    found: dict[str, int] = {}
    groups: Any = dist.distributed_c10d._world.pg_names
    for group, name in list(groups.items()):
        try:
            found[name] = group._get_sequence_number_for_group()
        except (RuntimeError, AttributeError):  # its backend does not count
            continue
    return found


def machine() -> str:
    """Return a name of this machine, equal for two processes exactly if their process numbers can be compared."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):  # without Linux the name has to do
        parts += [Path("/proc/sys/kernel/random/boot_id").read_text().strip()[:8], os.readlink("/proc/self/ns/pid")]
    return "/".join(parts)


def process_state(pid: int) -> tuple[str, str]:
    """Return a process's state as Linux's one letter, and when it began; empty strings if that cannot be read.

    `X` is a process that does not exist.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        return fields[0].decode(), fields[19].decode()
    except (FileNotFoundError, ProcessLookupError):
        return ("X", "") if os.path.exists("/proc/self/stat") else ("", "")
    except (OSError, IndexError):
        return "", ""


def child_numbers() -> list[int]:
    """Return the process numbers of this process's children by multiprocessing, as those that load data."""
    module: Any = sys.modules.get("multiprocessing.process")
    children = () if module is None else tuple(module._children)  # active_children() would reap them in this thread
    return [child.pid for child in children if child.pid is not None]


def _exchange(codes: list[CodeType]) -> str:
    """Return the exchange that the innermost code outside the standard library belongs to."""
    if not codes:
        return ""
    innermost = codes[0].co_filename
    if innermost == _BACKWARD:
        return BACKWARD
    if innermost in names_of_exchanges:
        return names_of_exchanges[innermost](codes[0])
    if not innermost.startswith(os.path.join(_TORCH, "distributed", "")):
        return ""
    name = codes[0].co_name
    for code in codes:
        if not code.co_filename.startswith(_TORCH):
            break
        if code.co_filename in _EXCHANGES and not code.co_name.startswith("_"):
            name = code.co_name
    return name


def _is_library(file: str, others: tuple[str, ...] = ()) -> bool:
    if file.startswith(("<", *others)):
        return True
    return file.startswith(_LIBRARY) and not file.startswith(_INSTALLED)


def _function(code: CodeType) -> str:
    return code.co_qualname.replace("<locals>.", "")


def _short(file: str) -> str:
    """Return the last two parts of a path."""
    return os.sep.join(Path(file).parts[-2:])
