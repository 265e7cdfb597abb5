"""Do work in a process of its own, which may die of it."""

from __future__ import annotations

import json
import os
import select
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

LIMIT_S = 120


@dataclass(frozen=True)
class Outcome:
    """How a process ended.

    Attributes:
        answer: what the work returned, None if it did not.
        raised: type and text of what it raised, empty if nothing.
        killed: whether it died of SIGKILL, as faults kill.
        output: the last lines that it printed.
    """

    answer: Any
    raised: str
    killed: bool
    output: str

    def __str__(self) -> str:
        how = "was killed" if self.killed else f"raised {self.raised}" if self.raised else "ended in silence"
        return f"{how if self.answer is None else 'ended'}\n{self.output}".strip()


def die() -> None:
    """End this process now, all its threads with it: no handler runs, no buffer is written out."""
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(LIMIT_S)  # in a thread that lives a moment longer: nothing more is done


def in_child(work: Callable[[], Any], limit_s: float = LIMIT_S) -> Outcome:
    """Call `work` in a fork of this process, which has everything imported, and return how that ended.

    `work` returns what JSON can hold.
    """
    receive, send = os.pipe()
    with tempfile.TemporaryFile() as printed:
        child = os.fork()
        if child == 0:
            os.close(receive)
            os.dup2(printed.fileno(), 1)
            os.dup2(printed.fileno(), 2)
            _answer(work, send)
        os.close(send)
        received, hung = _receive(receive, child, limit_s)
        _, status = os.waitpid(child, 0)
        printed.seek(0, os.SEEK_END)
        printed.seek(max(0, printed.tell() - 3000))
        output = printed.read().decode(errors="replace")
    killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL and not hung
    answer = json.loads(received) if received else {}
    raised = f"nothing within {limit_s} s" if hung else answer.get("raised", "")
    return Outcome(answer.get("answer"), raised, killed, output)


def _answer(work: Callable[[], Any], send: int) -> None:
    code = 1
    try:
        answer = json.dumps({"answer": work()})
        code = 0
    except BaseException as error:
        traceback.print_exc()
        answer = json.dumps({"raised": f"{type(error).__name__}: {error}"})
    try:
        with os.fdopen(send, "w") as pipe:
            pipe.write(answer)
    finally:
        os._exit(code)


def _receive(receive: int, child: int, limit_s: float) -> tuple[bytes, bool]:
    received, end = b"", time.monotonic() + limit_s
    with os.fdopen(receive, "rb", buffering=0) as pipe:
        while True:
            ready, _, _ = select.select([pipe], [], [], max(0, end - time.monotonic()))
            if not ready:
                os.kill(child, signal.SIGKILL)
                return received, True
            block = pipe.read(65536)
            if not block:
                return received, False
            received += block
