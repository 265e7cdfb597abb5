"""Have a process that loads data end when its parent does, not when a signal meant for the parent reaches it too."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def saves_when_told_to_stop(args: Any) -> bool:
    """Whether a run with these arguments ends by a signal only after it has saved."""
    return args.enable_jit_checkpoint and args.save_strategy != "no"


def leave_signals_to_parent(worker_id: int) -> None:
    """Let the parent alone decide when this process ends: to be called in a new worker process of a DataLoader.

    A terminal sends Ctrl-C, and launchers and schedulers send SIGTERM or SIGUSR1, to all processes of a group. A worker
    that ended by it would end the step for which its parent still needs a batch, before the parent can save. So SIGINT
    and SIGUSR1 are ignored here, and of SIGTERM only the parent's counts, where the system tells who sent it; the
    parent's death ends a worker in any case.
    """
    ignored = [getattr(signal, name) for name in ("SIGINT", "SIGUSR1") if hasattr(signal, name)]
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ignored)
    if hasattr(signal, "sigwaitinfo"):
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=_end_by_parent, daemon=True, name="signals of the parent").start()


@contextmanager
def signals_wait() -> Iterator[None]:
    """Have the signals that ask to stop wait in this block, in which workers are started.

    A worker begins with what its parent blocks. Without this one that comes to the whole group while a worker has not
    yet called `leave_signals_to_parent` would end that worker, and with it the step.
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    former = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGUSR1, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, former)


def _end_by_parent() -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
        pass
    os._exit(0)
