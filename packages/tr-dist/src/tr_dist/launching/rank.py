"""Run a script as one rank of a job, and record its exception for the launcher.

Started as a file: `rank.py [-m] SCRIPT ARGUMENT ...`. Imports only the standard library, so that the script's
own imports come first.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import runpy
import signal
import sys
import threading
import time
import traceback
from types import TracebackType
from typing import Any

ERROR_FILE = "TR_LAUNCH_ERROR_FILE"
LOG_FOLDER = "TR_LAUNCH_LOG_FOLDER"
LAUNCHER = "TR_LAUNCH_LAUNCHER"  # its process number, and the seconds that a rank gets to end after the launcher
_PATIENCE_S = 5.0  # how long a rank may take to end after its last exception
_LOOK_S = 0.5
_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Run the script as `__main__`, with its arguments and its folder first on the path."""
    is_module = sys.argv[1] == "-m"
    script, *arguments = sys.argv[2:] if is_module else sys.argv[1:]
    if launcher := os.environ.pop(LAUNCHER, ""):
        parent, within_s = launcher.split()
        end_with(int(parent), float(within_s))
    _write_to_own_file()
    if os.environ.get(ERROR_FILE):
        sys.excepthook = _note_and_show
    sys.argv[:] = [script, *arguments]
    if is_module:
        sys.path[0] = os.getcwd()
        runpy.run_module(script, run_name="__main__", alter_sys=True)
    else:
        path = os.path.abspath(script)
        sys.path[0] = os.path.dirname(path)
        runpy.run_path(path, run_name="__main__")


def end_with(parent: int, within_s: float) -> None:
    """Make this process end when its parent does, for any reason: nothing would forward a signal to it any more.

    It gets SIGTERM, at which a run saves. Its process group is killed `within_s` seconds later, because a rank that
    waits for dead ranks would never end. If the parent is gone already, this process ends at once.

    Args:
        parent: the parent's number. The thread that started this process must not end before the parent does.
        within_s: seconds that this process gets to end.
    """
    is_asked = sys.platform == "linux" and ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0) == 0
    if os.name != "nt" and os.getppid() != parent:  # it ended before or during the line above
        os._exit(128 + signal.SIGTERM)
    watch = threading.Thread(target=_follow, args=(parent, within_s, is_asked), name="launcher watch", daemon=True)
    watch.start()


def _follow(parent: int, within_s: float, is_asked: bool) -> None:
    _wait_for_end(parent)
    if not is_asked:
        os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(within_s)
    if os.name != "nt" and os.getpgid(0) == os.getpid():  # with its children, as the launcher would
        os.killpg(0, signal.SIGKILL)
    os.kill(os.getpid(), getattr(signal, "SIGKILL", signal.SIGTERM))


def _wait_for_end(parent: int) -> None:
    if os.name != "nt":
        while os.getppid() == parent:
            time.sleep(_LOOK_S)
        return
    kernel: Any = getattr(ctypes, "windll").kernel32  # where a process keeps its parent's number forever  # noqa: B009
    handle = kernel.OpenProcess(0x00100000, False, parent)  # SYNCHRONIZE
    if handle:
        kernel.WaitForSingleObject(handle, 0xFFFFFFFF)


def _write_to_own_file() -> None:
    folder = os.environ.get(LOG_FOLDER)
    if not folder:
        return
    with open(os.path.join(folder, f"rank_{os.environ['RANK']}.log"), "a", encoding="utf-8") as log:
        if restarts := int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")):
            log.write(f"--- restart {restarts}\n")
            log.flush()
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)


def _note_and_show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    while trace is not None and trace.tb_frame.f_code.co_filename in _OWN:
        trace = trace.tb_next  # these frames say nothing about the script
    text = "".join(traceback.format_exception(kind, error, trace))
    note = {"message": f"{kind.__name__}: {error}", "traceback": text, "time_s": time.time()}
    path = os.environ[ERROR_FILE]
    with contextlib.suppress(OSError):
        with open(path + ".new", "w", encoding="utf-8") as file:
            json.dump(note, file)
        os.replace(path + ".new", path)
        if not os.environ.get(LOG_FOLDER):
            # The launcher prints it, once for all ranks; this rank does if it does not end, or has no launcher.
            patience = threading.Timer(_PATIENCE_S, _show, [text])
            patience.daemon = True
            patience.start()
            return
    _show(text)


def _show(text: str) -> None:
    with contextlib.suppress(OSError, ValueError, AttributeError):  # no reader, or no stream
        sys.stderr.write(text)
        sys.stderr.flush()


_OWN = {__file__, runpy.__file__, "<frozen runpy>"}

if __name__ == "__main__":
    main()
