"""What other processes do with a folder's lock."""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

from tr_ckpt import FolderInUseError, folder_lock
from tr_ckpt.folder_lock import FolderLock


def hold(folder: str, connection: Any) -> None:
    """Lock a folder, say so, and unlock it when told."""
    lock = FolderLock(Path(folder))
    lock.claim()
    connection.send("locked")
    connection.poll(120)
    lock.release()


def die_with(folder: str) -> None:
    """Lock a folder and end like a process that is killed."""
    FolderLock(Path(folder)).claim()
    os._exit(9)


def race(folders: list[str], barrier: threading.Barrier, results: Any) -> None:
    """Claim each folder at the same moment as others; say which this process got."""
    folder_lock.ENDING_S = 0.0
    folder_lock._POLL_S = 0.001
    won = []
    for folder in folders:
        lock = FolderLock(Path(folder))
        barrier.wait(60)
        try:
            lock.claim()
            lock.check()
            won.append(folder)
        except FolderInUseError:
            pass
        barrier.wait(60)
        lock.release()
    results.put(won)


def save_and_wait(folder: str) -> None:
    """Be a script that saves once, says so and then waits; run as `python -c`."""
    from ckpt_parts import parts

    from tr_ckpt import Checkpointer

    checkpointer = Checkpointer(folder)
    checkpointer.save(1, parts(1))
    print("saved", flush=True)
    for line in sys.stdin:
        if line.startswith("save"):
            try:
                checkpointer.save(int(line.split()[1]), parts(1))
                print("saved", flush=True)
            except OSError as error:
                print(f"{type(error).__name__}: {error}", flush=True)
    time.sleep(0)
