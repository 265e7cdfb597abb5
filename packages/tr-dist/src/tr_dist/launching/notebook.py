"""Start a function of a notebook in several processes on this machine."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from tr_dist.environment import started_processes
from tr_dist.launching.rank import end_with
from tr_dist.launching.report import describe, read_ending
from tr_dist.process_group import here
from tr_log.streams import flush_streams

# Seconds that the others get once one has failed: first to end by themselves, then after SIGTERM.
_GRACE_S, _STOP_S = 2.0, 15.0
# After an interrupt they may be writing a checkpoint.
_SAVE_S = 300.0
_OUT_OF_MEMORY = (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS)


class NotebookError(RuntimeError):
    """A process of `notebook_launcher` failed, or the notebook's state does not allow to start one."""


def notebook_launcher(
    function: Callable[..., Any],
    args: Iterable[Any] = (),
    num_processes: int | None = None,
    mixed_precision: str = "no",
    use_port: int | str | None = None,
) -> None:
    """Call `function(*args)` in several processes of this machine, and return when all have ended.

    The processes are forks of this one, so functions and models of a notebook's cells can be used directly.
    A model that is built before and passed in `args` is held in memory once, until training writes to it. A model that
    is built in the function is held once in each process. Each process has the variables of a launcher (RANK,
    WORLD_SIZE, ...), and computes on the GPU of its rank, or on the CPU with one torch thread. With one process the
    function is called here.

    Args:
        function: the function to call.
        args: its arguments.
        num_processes: how many; None means one for each GPU, or one.
        mixed_precision: `no`, `fp16` or `bf16`, for training arguments that do not set it.
        use_port: a TCP port for the rendezvous; None finds a free one.

    Raises:
        NotebookError: a process failed, with the first cause and its traceback; CUDA was used before in this process;
            or this process is itself part of a launched job.
        ValueError: an argument is out of range.
        KeyboardInterrupt: the user interrupted; the processes were stopped, and have ended.
    """
    if mixed_precision not in ("no", "fp16", "bf16"):
        raise ValueError(f"mixed_precision={mixed_precision!r} is not known; choose no, fp16 or bf16")
    count = num_processes if num_processes is not None else max(1, torch.cuda.device_count())
    if count < 1:
        raise ValueError(f"num_processes={count} must be at least 1")
    if count > 1:
        _check_can_start(count)
    variables = _variables(mixed_precision, count, use_port)
    if count == 1:
        with _set(variables):
            function(*args)
        return
    with tempfile.TemporaryDirectory(prefix="tr_notebook_") as folder:
        context: Any = multiprocessing.get_context("fork")
        start = _Start()
        processes = [
            context.Process(target=_become_rank, args=(rank, start, variables, folder, function, tuple(args)))
            for rank in range(count)
        ]
        flush_streams()
        _run(start, processes)
        if any(process.exitcode for process in processes):
            raise NotebookError(_report(processes, folder))


def _check_can_start(count: int) -> None:
    if number := started_processes(os.environ):
        raise NotebookError(
            f"this is already one of {number} processes (WORLD_SIZE); call the function itself, or "
            "start this file without a launcher"
        )
    if not hasattr(os, "fork"):
        raise NotebookError(
            "notebook_launcher needs fork, which this system has not; write the function to a file and start it with "
            "`trainer launch`"
        )
    if torch.distributed.is_initialized():
        raise NotebookError(
            "this process is in a process group, which its copies cannot share; close the strategy that joined it "
            "(close() or trainer.end()), or call torch.distributed.destroy_process_group()"
        )
    if torch.cuda.is_initialized():
        raise NotebookError(
            "CUDA was used in this notebook before, and its processes cannot share that; restart the notebook, and "
            "move nothing to the GPU (no .to('cuda'), no Trainer) outside of the function that is launched"
        )
    if torch.cuda.is_available() and count > torch.cuda.device_count():
        raise ValueError(
            f"num_processes={count}, but {torch.cuda.device_count()} GPU(s) are visible and each process needs its own"
        )


def _variables(mixed_precision: str, count: int, port: int | str | None) -> dict[str, str]:
    variables = {} if mixed_precision == "no" else {"ACCELERATE_MIXED_PRECISION": mixed_precision}
    if count == 1:
        return variables
    # Without it accelerate's own Accelerator treats each of several processes on the CPU as a separate run.
    on_cpu = {} if torch.cuda.is_available() else {"ACCELERATE_USE_CPU": "true"}
    return {
        **variables,
        **on_cpu,
        "FORK_LAUNCHED": "1",
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port or _free_port()),
    }


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@contextlib.contextmanager
def _set(variables: dict[str, str]) -> Any:
    former = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in former.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _become_rank(
    rank: int,
    start: _Start,
    variables: dict[str, str],
    folder: str,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    """Entry point of a spawned rank; ends the process with its exit code."""
    os.environ.update(variables, RANK=str(rank), LOCAL_RANK=str(rank))
    # Threads are not copied: a parallel operation would wait forever for the notebook's threads.
    torch.set_num_threads(1)
    here.keep_inherited()
    try:
        start.begin()
        function(*args)
    except SystemExit:
        raise
    except BaseException as error:
        text = "".join(traceback.format_exception(error))
        note = {"message": f"{type(error).__name__}: {error}", "traceback": text, "time_s": time.time()}
        Path(folder, f"{rank}.json").write_text(json.dumps(note), "utf-8")
        sys.exit(128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1)


class _Start:
    """Starts the processes, and holds an interrupt back until each can receive it: it would be lost to them.

    A process inherits that it is held back until `begin`, and so loses what a terminal sends to the whole group: the
    notebook passes it on.
    """

    def __init__(self) -> None:
        self._notebook = os.getpid()
        self._former: Any = signal.getsignal(signal.SIGINT)
        self._is_interrupted = False
        self._ends = (-1, -1)

    def start(self, processes: list[BaseProcess]) -> None:
        """Start all, and wait until each has begun; then be interrupted, if the user did that meanwhile."""
        if threading.current_thread() is not threading.main_thread():  # no other is interrupted
            self._start(processes)
            return
        signal.signal(signal.SIGINT, self._note)
        try:
            self._start(processes)
        finally:
            self._restore()
        if self._is_interrupted:
            signal.raise_signal(signal.SIGINT)

    def begin(self) -> None:
        """In a started process: get interrupts from the notebook alone, and tell it that this one can get them."""
        os.setsid()
        end_with(self._notebook, _SAVE_S)
        self._restore()
        os.write(self._ends[1], b".")
        for end in self._ends:
            os.close(end)

    def _start(self, processes: list[BaseProcess]) -> None:
        for process in processes:
            self._ends = os.pipe()
            with open(self._ends[0], "rb") as begun:
                try:
                    process.start()
                finally:
                    os.close(self._ends[1])
                begun.read(1)  # nothing, if it has ended

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._is_interrupted = True

    def _restore(self) -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL if self._former is None else self._former)


def _run(start: _Start, processes: list[BaseProcess]) -> None:
    """Start all processes and wait for them; after a failure or an interrupt stop the others."""
    try:
        start.start(processes)
        while running := [process for process in processes if process.is_alive()]:
            if any(process.exitcode for process in processes):  # also one that the line above found ended
                break
            wait([process.sentinel for process in running])
        _join(processes, _GRACE_S)
    except KeyboardInterrupt:
        _signal(processes, signal.SIGINT)
        _join(processes, _SAVE_S)
        raise
    finally:
        _signal(processes, signal.SIGTERM)
        _join(processes, _STOP_S)
        _signal(processes, signal.SIGKILL)
        _join(processes, _STOP_S)


def _signal(processes: list[BaseProcess], number: signal.Signals) -> None:
    for process in processes:
        if process.is_alive() and process.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, number)


def _join(processes: list[BaseProcess], within_s: float) -> None:
    end_s = time.monotonic() + within_s
    for process in processes:
        if process.pid is not None:  # where one could not be started, the others are stopped
            process.join(max(0.0, end_s - time.monotonic()))


def _report(processes: list[BaseProcess], folder: str) -> str:
    codes = {rank: process.exitcode for rank, process in enumerate(processes)}
    endings = [read_ending(rank, code, Path(folder, f"{rank}.json")) for rank, code in codes.items()]
    failed = [ending for ending in endings if ending.message or ending.code != -signal.SIGTERM]
    text = describe(failed or endings, world_size=len(processes), nodes=1, logs={})
    if any(ending.code and -ending.code in _OUT_OF_MEMORY for ending in failed):
        text += (
            "\nin a notebook this is most often memory that ran out, because each process builds a model of its own; "
            f"build it once, in a cell, and pass it: notebook_launcher(training_function, (model,), "
            f"num_processes={len(processes)})"
        )
    return text
