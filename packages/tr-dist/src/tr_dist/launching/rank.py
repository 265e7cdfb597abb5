"""Run a script as one rank of a job, and note its exception for the launcher.

Started as a file: `rank.py [-m] SCRIPT ARGUMENT ...`. Imports nothing but the standard library, so that the script's
own imports come first.
"""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import sys
import threading
import time
import traceback
from types import TracebackType

ERROR_FILE = "TR_LAUNCH_ERROR_FILE"
LOG_FOLDER = "TR_LAUNCH_LOG_FOLDER"
_PATIENCE_S = 5.0  # that a rank may take to end after its last exception


def main() -> None:
    """Become the script: its arguments, its folder first on the path, its name `__main__`."""
    is_module = sys.argv[1] == "-m"
    script, *arguments = sys.argv[2:] if is_module else sys.argv[1:]
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
            # The launcher says it, once for all ranks; this one does where it does not end, or nobody is there.
            patience = threading.Timer(_PATIENCE_S, _show, [text])
            patience.daemon = True
            patience.start()
            return
    _show(text)


def _show(text: str) -> None:
    with contextlib.suppress(OSError, ValueError, AttributeError):  # nobody reads it, or there is no stream
        sys.stderr.write(text)
        sys.stderr.flush()


_OWN = {__file__, runpy.__file__, "<frozen runpy>"}

if __name__ == "__main__":
    main()
