"""Record the signals that ask a process to stop. A second one ends the process at once; its workers ignore them."""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import Any, Self

from tr_args.fields.saving import SavingFields
from tr_log import get_logger, info_once

logger = get_logger(__name__)

SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGUSR1") if hasattr(signal, name))

# The system sends a signal to a whole group, and a launcher forwards it to the same processes again. The same signal
# within this time is therefore the same request. Ctrl-C is exempt: a person pressed it twice.
_REPEATED_WITHIN_S = 1.0


class Interrupted(SystemExit):
    """Ends `Trainer.train` after a signal; uncaught, it ends the process with code 128 + the signal's number.

    Attributes:
        checkpoint: folder of the checkpoint of that step.
    """

    def __init__(self, number: int, step: int, checkpoint: Path) -> None:
        super().__init__(number, step, checkpoint)
        self.signal, self.step, self.checkpoint = signal.Signals(number), step, checkpoint
        self.code = 128 + number

    def __str__(self) -> str:
        return f"{self.signal.name} at step {self.step}, saved as {self.checkpoint}"


class KeyboardInterrupted(Interrupted, KeyboardInterrupt):
    """Ends `Trainer.train` after Ctrl-C: also a `KeyboardInterrupt`, for those who catch that."""


def interrupted(number: int, step: int, checkpoint: Path) -> Interrupted:
    """Return the exception of a signal."""
    kind = KeyboardInterrupted if number == signal.SIGINT else Interrupted
    return kind(number, step, checkpoint)


class StopSignals:
    """Inside this block SIGTERM, SIGUSR1 and SIGINT set a flag; a second of them ends the process at once.

    It takes only signals with their default handler. An ignored signal stays ignored, as in a job that the shell put
    into the background. A handler of the user or of a library stays. Outside of the main thread Python allows no
    handlers, and none are set. The block restores everything at its end.

    A thread counts the signals too: the main thread may be in a call that Python cannot interrupt, as an exchange with
    a hanging rank, and it sees two equal signals as one if they come before it can run their handler.

    A process forked in this block inherits the handlers; there they act as the former ones would.

    Args:
        notify: called, once, by the handler of the first signal. It may run between any two operations of the main
            thread.

    Attributes:
        number: the first signal that came; 0 if none has.
    """

    def __init__(self, notify: Callable[[], None]) -> None:
        self._notify = notify
        self._watch = _Watch()
        self._process = os.getpid()
        self._former: dict[int, Any] = {}
        self._came: list[int] = []
        self._first_s = math.inf

    @property
    def number(self) -> int:
        """The first signal that came; 0 if none has."""
        return self._came[0] if self._came else 0

    def __enter__(self) -> Self:
        if threading.current_thread() is not threading.main_thread():
            info_once(
                logger,
                "train() is not called in the main thread, so signals act as without it: they save no checkpoint",
            )
            return self
        for number in SIGNALS:
            former = signal.getsignal(number)
            if former in (signal.SIG_DFL, signal.default_int_handler) and not _is_caught_outside_of_python(number):
                self._former[number] = signal.signal(number, self._handle)
            elif former != signal.SIG_IGN:
                info_once(
                    logger,
                    "%s has a handler already, which stays: no checkpoint is written for it unless that one asks for "
                    "it. signal.signal(signal.%s, signal.SIG_DFL) before train() takes it away",
                    *[signal.Signals(number).name] * 2,
                )
        if self._former and os.name != "nt":
            self._watch.start(frozenset(self._former))
        return self

    def __exit__(self, *error: object) -> None:
        self._watch.stop()
        for number, former in self._former.items():
            signal.signal(number, former)
        self._former = {}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:
            signal.signal(number, self._former.get(number, signal.SIG_DFL))
            os.kill(os.getpid(), number)
            return
        self._came.append(number)  # first of all: another signal's handler may run in between
        now_s = time.monotonic()
        if len(self._came) == 1:
            self._first_s = now_s
            self._notify()
        elif _is_another(number, self._came[0], now_s - self._first_s):
            _end_at_once(number)


class _Watch:
    """Counts signals in a thread, at the moment they arrive."""

    _current: _Watch | None = None
    _write = -1

    def start(self, numbers: frozenset[int]) -> None:
        """Start, unless something else receives the signals, as an event loop does."""
        read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        former = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        if former != -1:
            signal.set_wakeup_fd(former)
            os.close(read)
            os.close(self._write)
            return
        _Watch._current = self
        threading.Thread(target=self._count, args=(read, numbers), daemon=True, name="second signals").start()

    def stop(self) -> None:
        """End the thread."""
        if _Watch._current is self:
            signal.set_wakeup_fd(-1)
            _Watch._current = None
            os.write(self._write, b"\0")  # closing would not do: children may have it open
            os.close(self._write)

    @staticmethod
    def _count(read: int, numbers: frozenset[int]) -> None:
        first, first_s = 0, math.inf
        while number := os.read(read, 1)[0]:
            if number not in numbers:
                continue
            now_s = time.monotonic()
            if not first:
                first, first_s = number, now_s
            elif _is_another(number, first, now_s - first_s):
                _end_at_once(number)
        os.close(read)

    @classmethod
    def forget(cls) -> None:
        """Stop counting in a forked copy of the process."""
        if cls._current is not None:
            cls._current = None
            signal.set_wakeup_fd(-1)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_Watch.forget)


def _is_another(number: int, first: int, after_s: float) -> bool:
    """Whether a signal `after_s` seconds after the first is a new request, not the same one forwarded."""
    return number != first or number == signal.SIGINT or after_s >= _REPEATED_WITHIN_S


def _end_at_once(number: int) -> None:
    """End this process and its children without running more Python."""
    with contextlib.suppress(Exception):
        for child in multiprocessing.active_children():
            child.kill()
    text = f"{signal.Signals(number).name}, the second signal: stopping at once; complete checkpoints stay as they are"
    with contextlib.suppress(OSError):
        shown = "\x1b[?25h" if os.isatty(2) else ""  # a bar hides the cursor
        os.write(2, f"{shown}\n{text}\n".encode())
    os._exit(128 + number)


def _is_caught_outside_of_python(number: int) -> bool:
    """Whether non-Python code handles the signal, as with `faulthandler.register`; detected on Linux only."""
    try:
        status = Path("/proc/self/status").read_text("ascii")
    except (OSError, ValueError):
        return False
    caught = next((line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:")), "0")
    is_caught = bool(int(caught, 16) >> (number - 1) & 1)
    return is_caught and signal.getsignal(number) == signal.SIG_DFL


# Worker processes of data loaders


def saves_on_signal(args: SavingFields) -> bool:
    """Whether a run with these arguments saves before it ends by a signal."""
    return args.enable_jit_checkpoint and args.save_strategy != "no"


def ignore_group_signals(worker_id: int) -> None:
    """Ignore signals to the process group in a new worker process of a DataLoader; the parent ends it.

    A terminal sends Ctrl-C to all processes of a group, and launchers and schedulers send SIGTERM or SIGUSR1. A worker
    that ended by it would end the step before the parent can save, because the parent still needs its batch. So SIGINT
    and SIGUSR1 are ignored here. Of SIGTERM only the parent's counts, where the system gives the sender. The parent's
    death ends a worker in any case.
    """
    ignored = [getattr(signal, name) for name in ("SIGINT", "SIGUSR1") if hasattr(signal, name)]
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ignored)
    if hasattr(signal, "sigwaitinfo"):
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=_exit_on_parent_signal, daemon=True, name="signals of the parent").start()
    end_with_parent()


def end_with_parent(worker_id: int = 0) -> None:
    """End a new worker process when its parent has ended, also if a fork server started it.

    Torch's workers look whether the process that started them is there. A fork server is, as long as they are.
    """
    parent = multiprocessing.parent_process()
    if parent is not None and parent.pid != os.getppid():
        threading.Thread(target=_exit_after, args=(parent,), daemon=True, name="end of the parent").start()


def _exit_after(parent: BaseProcess) -> None:
    parent.join()
    os._exit(1)


@contextlib.contextmanager
def blocked_signals() -> Iterator[None]:
    """Block stop signals while workers start in this block.

    A worker inherits the blocked signals of its parent. Without this block, a signal to the group could arrive before
    the worker has called `ignore_group_signals`. It would end that worker, and with it the step.
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    former = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGUSR1, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, former)


def _exit_on_parent_signal() -> None:
    parent = multiprocessing.parent_process()
    number = os.getppid() if parent is None else parent.pid
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != number:
        pass
    os._exit(0)
