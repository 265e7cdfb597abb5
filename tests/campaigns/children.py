"""Do work in forks of this process, which has everything imported, and learn how each ended."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import selectors
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

LIMIT_S = 120.0
GRACE_S = 10.0  # for the other ranks once one has failed, before they are killed as a launcher does

Gathered = Callable[[Any], list[Any]]

# What a process notes while it works, to be known whether it ends well or with an error.
_noted: dict[str, Any] = {}


@dataclass
class End:
    """How a process ended.

    Attributes:
        answer: what its work returned; None if it did not.
        error: type of what it raised, with those it derives from; empty if nothing.
        text: what that says.
        noted: what it noted; empty if it was killed.
        signal: that it died of by itself.
        hung: whether it had to be killed.
        stopped: whether it was killed because another rank had failed.
        output: the last lines that it printed.
    """

    answer: Any = None
    error: str = ""
    text: str = ""
    noted: dict[str, Any] = field(default_factory=dict)
    signal: int = 0
    hung: bool = False
    stopped: bool = False
    output: str = ""

    @property
    def killed(self) -> bool:
        """Whether it died of SIGKILL by itself, as faults kill."""
        return self.signal == signal.SIGKILL

    @property
    def raised(self) -> str:
        """Type and text of what it raised, empty if nothing."""
        return f"{self.error.split()[0]}: {self.text}" if self.error else ""

    def __str__(self) -> str:
        if self.answer is not None:
            return f"ended with {self.answer!r:.200}"
        if self.hung or self.stopped:
            return f"did not end\n{self.output}" if self.hung else "was killed after another rank had failed"
        if self.signal:
            return f"died of {signal.Signals(self.signal).name}: {self.output[-500:]}"
        return f"raised {self.raised}\n{self.output}" if self.error else f"ended in silence\n{self.output}"


def die() -> None:
    """End this process now, all its threads with it: no handler runs, no buffer is written out."""
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(LIMIT_S)  # in a thread that lives a moment longer: nothing more is done


def note(**values: Any) -> None:
    """Note what is to be known of this process if it ends with an error, too."""
    _noted.update(values)


def noted(name: str, otherwise: Any) -> Any:
    """Return what this process has noted under a name."""
    return _noted.get(name, otherwise)


def place_of(rank: int, world_size: int, meet: Path) -> dict[str, str]:
    """Return the variables of a launcher for one rank; they meet through a file."""
    place = {
        "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size,
        "GROUP_RANK": 0, "TR_RENDEZVOUS_FILE": meet,
    }  # fmt: skip
    return {name: str(value) for name, value in place.items()}


def in_child(work: Callable[[], Any], limit_s: float = LIMIT_S) -> End:
    """Call `work` in a fork and return how that ended; it returns what JSON can hold."""
    [end] = in_ranks(lambda rank, gather: work(), 1, limit_s)
    return end


def in_ranks(
    work: Callable[[int, Gathered], Any], world_size: int, limit_s: float = LIMIT_S, grace_s: float = GRACE_S
) -> list[End]:
    """Call `work(rank, gather)` in forks, one a rank, and return how each ended.

    Args:
        work: returns what JSON can hold; `gather` returns the value of every rank to each of two.
        world_size: how many.
        limit_s: seconds after which they are killed.
        grace_s: seconds after which they are killed once one has failed.
    """
    pairs = socket.socketpair() if world_size == 2 else ()
    children = []
    for rank in range(world_size):
        receive, send = os.pipe()
        printed = tempfile.TemporaryFile()  # noqa: SIM115
        child = os.fork()
        if child == 0:
            os.close(receive)
            if pairs:
                pairs[1 - rank].close()
            gather = Gather(pairs[rank], rank) if pairs else (lambda value: [value])
            _become(lambda rank=rank, gather=gather: work(rank, gather), send, printed.fileno())
        os.close(send)
        children.append((child, receive, printed))
    for pair in pairs:
        pair.close()
    return _wait(children, limit_s, grace_s)


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


def _become(work: Callable[[], Any], send: int, printed: int) -> None:
    code = 1
    try:
        os.dup2(printed, 1)
        os.dup2(printed, 2)
        try:
            said = json.dumps({"answer": work(), "noted": _noted})
            code = 0
        except BaseException as error:
            traceback.print_exc()
            kinds = " ".join(kind.__name__ for kind in type(error).__mro__)
            said = json.dumps({"error": kinds, "text": str(error), "noted": _noted})
        with contextlib.suppress(OSError):  # where nothing can be printed
            sys.stdout.flush()
            sys.stderr.flush()
        with os.fdopen(send, "w") as pipe:
            pipe.write(said)
    finally:
        os._exit(code)


def _wait(children: list[tuple[int, int, Any]], limit_s: float, grace_s: float) -> list[End]:
    """Return how children ended, of each of which the number, the pipe and the file of what it prints are given."""
    ends, said, has_failed = [End() for _ in children], [b""] * len(children), False
    deadline = time.monotonic() + limit_s
    with selectors.DefaultSelector() as pipes:
        for rank, (_, pipe, _) in enumerate(children):
            pipes.register(pipe, selectors.EVENT_READ, rank)
        while pipes.get_map():
            ready = pipes.select(None if deadline == float("inf") else max(0.0, deadline - time.monotonic()))
            if not ready:
                _kill([(children[key.data][0], ends[key.data]) for key in pipes.get_map().values()], has_failed)
                deadline = float("inf")
            for key, _ in ready:
                if block := os.read(key.fd, 1 << 16):
                    said[key.data] += block
                    continue
                pipes.unregister(key.fd)
                if _reap(children[key.data], said[key.data], ends[key.data]) and not has_failed:
                    has_failed, deadline = True, min(deadline, time.monotonic() + grace_s)
    return ends


def _kill(living: list[tuple[int, End]], has_failed: bool) -> None:
    for child, end in living:
        end.stopped, end.hung = has_failed, not has_failed
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)


def _reap(child: tuple[int, int, Any], said: bytes, end: End) -> int:
    """Fill in how a child ended that has said all; return its status."""
    pid, pipe, printed = child
    os.close(pipe)
    _, status = os.waitpid(pid, 0)
    with contextlib.suppress(ValueError):  # of what it said, a kill may have cut off the end
        vars(end).update(json.loads(said or b"{}"))
    if os.WIFSIGNALED(status) and not (end.stopped or end.hung):
        end.signal = os.WTERMSIG(status)
    with printed:
        printed.seek(max(0, printed.seek(0, os.SEEK_END) - 3000))
        end.output = printed.read().decode(errors="replace")
    return status
