"""Run one or two ranks in forks of this process, which has everything imported, and learn how each ended."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LIMIT_S = 60.0
GRACE_S = 10.0  # for the other ranks once one has failed, before they are killed as a launcher does

# What a rank notes while it works, so that it is known however it ends: the step of its newest complete checkpoint.
_noted: dict[str, Any] = {}


@dataclass
class End:
    """How a process ended.

    Attributes:
        answer: what its work returned; None if it did not.
        error: type of what it raised, with those it derives from; empty if nothing.
        text: what that says.
        noted: what it noted.
        signal: that it died of by itself.
        hung: whether it had to be killed.
        killed: whether it was killed because another rank had failed.
        output: the last lines that it printed.
    """

    answer: Any = None
    error: str = ""
    text: str = ""
    noted: dict[str, Any] | None = None
    signal: int = 0
    hung: bool = False
    killed: bool = False
    output: str = ""

    def __str__(self) -> str:
        if self.hung or self.killed:
            return "did not end" if self.hung else "was killed after another rank had failed"
        if self.signal:
            return f"died of {signal.Signals(self.signal).name}: {self.output[-500:]}"
        return f"raised {self.error.split()[0]}: {self.text}" if self.error else f"ended with {self.answer!r}"


def note(**values: Any) -> None:
    """Note what is to be known however this process ends."""
    _noted.update(values)


def noted(name: str, otherwise: Any) -> Any:
    """Return what this process has noted under a name."""
    return _noted.get(name, otherwise)


def in_ranks(work: Callable[[int, Callable[[Any], list[Any]]], Any], world_size: int, folder: Path) -> list[End]:
    """Call `work(rank, gather)` in forks, one a rank, and return how each ended.

    Args:
        work: returns what JSON can hold; `gather` returns the value of every rank to each, through pipes.
        world_size: how many.
        folder: for what they print.
    """
    pairs = socket.socketpair() if world_size == 2 else ()
    started: dict[int, tuple[int, int]] = {}  # by pid: rank and pipe
    for rank in range(world_size):
        receive, send = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(receive)
            if pairs:
                pairs[1 - rank].close()
            gather = Gather(pairs[rank], rank) if pairs else (lambda value: [value])
            _become(rank, work, gather, send, folder)
        os.close(send)
        started[child] = rank, receive
    for pair in pairs:
        pair.close()
    return _wait(started, folder)


class Gather:
    """Exchange values between two ranks through a socket."""

    def __init__(self, peer: socket.socket, rank: int) -> None:
        self._peer = peer
        self._rank = rank

    def __call__(self, value: Any) -> list[Any]:
        data = pickle.dumps(value)
        self._peer.sendall(len(data).to_bytes(8, "big") + data)
        other = pickle.loads(self._receive(int.from_bytes(self._receive(8), "big")))
        return [value, other] if self._rank == 0 else [other, value]

    def _receive(self, number: int) -> bytes:
        received = b""
        while len(received) < number:
            part = self._peer.recv(number - len(received))
            if not part:
                raise RuntimeError("the other rank is gone")
            received += part
        return received


def _become(rank: int, work: Callable[..., Any], gather: Callable[[Any], list[Any]], send: int, folder: Path) -> None:
    code = 1
    try:
        printed = os.open(folder / f"printed-{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(printed, 1)
        os.dup2(printed, 2)
        found: dict[str, Any] = {}
        try:
            found["answer"] = work(rank, gather)
            code = 0
        except BaseException as error:
            traceback.print_exc()
            found = {"error": " ".join(kind.__name__ for kind in type(error).__mro__), "text": str(error)}
        sys.stdout.flush()
        sys.stderr.flush()
        with os.fdopen(send, "w") as pipe:
            json.dump({**found, "noted": _noted}, pipe)
    finally:
        os._exit(code)


class _Waiting:
    """Ranks that were started, until all have ended."""

    def __init__(self, started: dict[int, tuple[int, int]]) -> None:
        self.ends = {rank: End() for rank, _ in started.values()}
        self._ranks = {pipe: rank for rank, pipe in started.values()}
        self._said = {pipe: b"" for pipe in self._ranks}
        self._living = {child: rank for child, (rank, _) in started.items()}
        self._deadline = time.monotonic() + LIMIT_S
        self._failed = False

    def wait(self) -> None:
        while self._living or self._said:
            ready, _, _ = select.select(list(self._said), [], [], 0.02 if not self._said else 0.2)
            for pipe in ready:
                self._hear(pipe)
            for child in list(self._living):
                self._reap(child)
            if self._living and time.monotonic() > self._deadline:
                self._kill()

    def _hear(self, pipe: int) -> None:
        block = os.read(pipe, 1 << 16)
        if block:
            self._said[pipe] += block
            return
        os.close(pipe)
        for name, value in json.loads(self._said.pop(pipe) or b"{}").items():
            setattr(self.ends[self._ranks[pipe]], name, value)

    def _reap(self, child: int) -> None:
        done, status = os.waitpid(child, os.WNOHANG)
        if not done:
            return
        end = self.ends[self._living.pop(child)]
        if os.WIFSIGNALED(status) and not (end.killed or end.hung):
            end.signal = os.WTERMSIG(status)
        if status and not self._failed:
            self._failed, self._deadline = True, min(self._deadline, time.monotonic() + GRACE_S)

    def _kill(self) -> None:
        for child, rank in self._living.items():
            self.ends[rank].killed, self.ends[rank].hung = self._failed, not self._failed
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        self._deadline = float("inf")


def _wait(started: dict[int, tuple[int, int]], folder: Path) -> list[End]:
    waiting = _Waiting(started)
    waiting.wait()
    for rank, end in waiting.ends.items():
        printed = folder / f"printed-{rank}"
        end.output = printed.read_text(errors="replace")[-3000:] if printed.exists() else ""
        printed.unlink(missing_ok=True)
    return [waiting.ends[rank] for rank in sorted(waiting.ends)]
