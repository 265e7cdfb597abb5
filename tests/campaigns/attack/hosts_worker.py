"""Save to a folder as another host would, by a namespace of names of its own: `hosts_worker.py HOST FOLDER`.

Each line on stdin is a step to save; each line on stdout what came of it. Exits with `NO_NAMESPACES` where the system
grants none.
"""

from __future__ import annotations

import ctypes
import socket
import sys
from pathlib import Path
from typing import Any

NO_NAMESPACES = 77
_NEW_NAMES, _NEW_USER = 0x04000000, 0x10000000  # CLONE_NEWUTS, CLONE_NEWUSER


class Numbers:
    """A part of a checkpoint."""

    def __init__(self) -> None:
        self.step = 0

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.step = state_dict["step"]


def enter(host: str) -> None:
    """Give this process a host name that no other process has; before any thread is started."""
    system = ctypes.CDLL(None, use_errno=True)
    if system.unshare(_NEW_NAMES) and system.unshare(_NEW_NAMES | _NEW_USER):
        sys.exit(NO_NAMESPACES)
    socket.sethostname(host)


def serve(folder: Path) -> None:
    """Save the steps that are asked for, the last one alone being kept."""
    from tr_ckpt import Checkpointer

    checkpointer, numbers = Checkpointer(folder, keep_last=1), Numbers()
    print("ready", flush=True)
    for line in sys.stdin:
        numbers.step = int(line)
        try:
            checkpointer.save(numbers.step, {"numbers": numbers})
            print(f"saved {numbers.step}", flush=True)
        except (OSError, ValueError, RuntimeError) as error:
            print(f"refused: {type(error).__name__}: {' '.join(str(error).split())}", flush=True)


if __name__ == "__main__":
    enter(sys.argv[1])
    serve(Path(sys.argv[2]))
