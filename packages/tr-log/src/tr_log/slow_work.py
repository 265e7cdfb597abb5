"""Do what takes long, as a disk may, while other ranks wait: no exchange between them lasts as long as the work."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import ExitStack
from contextvars import copy_context
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")

# How often ranks hear of each other while one works. A backend, and a watch for hangs, ends longer exchanges.
HEAR_EVERY_S = 1.0


class _Busy(NamedTuple):
    """The answer of a rank that is not done, with the operations that it has done."""

    operations: int


@dataclass
class Wait:
    """Ranks that wait for each other's work in their main threads, as a watch for hangs sees it.

    Attributes:
        before: what `measure` returned when the wait began: that they hear of each other is no progress.
        thread: number of the thread that does this rank's work; None once it is done.
        operations: those that each rank has done, as of when they last heard of each other.
    """

    before: Any
    thread: int | None = None
    operations: tuple[int | None, ...] = ()


current: Wait | None = None


def measure() -> Any:
    """Return how many exchanges this process has begun; who watches it puts a function of its own here."""
    return None


_operations = 0


def advance() -> None:
    """Count an operation of slow work: it goes on, however slowly."""
    global _operations
    _operations += 1


def apart(
    exchange: Callable[[Any], list[Any]], work: Callable[[], Any], give_up: Callable[[], None] | None = None
) -> list[Any]:
    """Run `work`, which raises nothing and exchanges nothing, in a thread, and return the results of all ranks.

    Collective. The ranks tell each other every `HEAR_EVERY_S` that they live. A rank that is gone ends the wait by the
    error of the exchange.

    Args:
        exchange: takes a picklable value, returns those of all ranks.
        work: what this rank does.
        give_up: if the wait ends by an exception, as Ctrl-C, it is called, and the end of `work` is waited for: what
            follows may remove what `work` still writes to. None does not wait.
    """
    global current
    waiting, outer = Wait(measure()), current
    is_main = threading.current_thread() is threading.main_thread()
    current = waiting if is_main else outer

    def noted() -> Any:
        waiting.thread = threading.get_ident()
        try:
            return work()
        finally:
            waiting.thread = None

    future = in_thread(noted)
    try:
        while True:
            done = bool(wait([future], HEAR_EVERY_S).done)
            answers = exchange(future.result() if done else _Busy(_operations))
            if not any(isinstance(answer, _Busy) for answer in answers):
                return answers
            waiting.operations = tuple(each.operations if isinstance(each, _Busy) else None for each in answers)
    except BaseException:
        if give_up is not None:
            give_up()
            wait([future])
        raise
    finally:
        current = outer if is_main else current


def in_thread(work: Callable[[], T]) -> Future[T]:
    """Run `work` in a thread of its own that the interpreter does not wait for, as it would run in this one."""
    future: Future[T] = Future()
    context, settings = copy_context(), _settings_of_torch()

    def run() -> None:
        try:
            with ExitStack() as stack:
                for setting in settings:
                    stack.enter_context(setting())
                result = context.run(work)
        except BaseException as error:  # of any kind: the caller raises it
            future.set_exception(error)
        else:
            future.set_result(result)

    try:
        # With the name of the thread whose work it does.
        threading.Thread(target=run, name=threading.current_thread().name, daemon=True).start()
    except RuntimeError:  # as while the interpreter exits
        run()
    return future


def _settings_of_torch() -> list[Callable[[], Any]]:
    """Return what gives another thread torch's settings of this one: gradients, and the stream that copies wait for."""
    torch: Any = sys.modules.get("torch")  # this package does not import it
    if torch is None:
        return []
    gradients, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    settings = [lambda: torch.inference_mode(inference), lambda: torch.set_grad_enabled(gradients)]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        stream = torch.cuda.current_stream()
        settings.append(lambda: torch.cuda.stream(stream))
    return settings
