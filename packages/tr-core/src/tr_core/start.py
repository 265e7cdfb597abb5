"""Import names when they are first used, without a collection of garbage, and measure the phases of a start.

A start is what comes before the first step of a run. Its phases are logged at the level debug.
"""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from itertools import chain, islice
from time import perf_counter
from typing import Any, TypeVar

logger = logging.getLogger("tr_core.trainer")

STAGES = ("imports", "arguments", "strategy", "model to device", "data", "optimizer", "resume", "callbacks")
FIRST_BATCH = "first batch"


def on_first_use(
    package: str, origins: Mapping[str, str], modules: Collection[str] = ()
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` for a package that imports its names when they are first used."""

    def get(name: str) -> Any:
        if name in modules:
            return import_module(f"{package}.{name}")
        if name not in origins:
            raise AttributeError(f"module {package!r} has no attribute {name!r}; it has {', '.join(sorted(origins))}")
        with stage("imports"), without_collection():
            value = getattr(import_module(origins[name]), name)
        setattr(sys.modules[package], name, value)  # the next access does not call this function
        return value

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *origins})

    return get, names


# More frozen objects than this somebody keeps so. Collections of Python 3.12 freeze some hundred: the immortal ones.
_KEPT_FROZEN = 2_000


@contextmanager
def without_collection() -> Iterator[None]:
    """Collect no garbage in a block of imports, and not because of what they made.

    Nothing that an import makes is garbage, but enough of it starts a collection, which looks at all objects that torch
    made: a tenth of a second. What is garbage already is found by a later collection.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        if gc.get_freeze_count() < _KEPT_FROZEN:
            gc.freeze()  # the two together make all objects old ones, and the counts of new ones zero
            gc.unfreeze()
        gc.enable()


class _Start:
    """Hold the seconds of each stage of the start that is under way in this process."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.began_s: float | None = None  # when the run began
        self.inner_s = 0.0  # of the stages inside the active one


_start = _Start()


@contextmanager
def stage(name: str) -> Iterator[None]:
    """Count the time of a block, or of a function that this decorates, as a stage; not the time of a stage inside."""
    outer_s, _start.inner_s, since_s = _start.inner_s, 0.0, perf_counter()
    try:
        yield
    finally:
        taken_s = perf_counter() - since_s
        _start.seconds[name] = _start.seconds.get(name, 0.0) + taken_s - _start.inner_s
        _start.inner_s = outer_s + taken_s


def begin_run(arguments_s: float) -> None:
    """Note that a run begins, and how long building its arguments took."""
    _start.began_s = perf_counter()
    _start.seconds["arguments"] = arguments_s


Batch = TypeVar("Batch")


def log_at_first(batches: Iterator[Batch]) -> Iterator[Batch]:
    """Return the same batches; the first one of a run ends its start, whose stages are then logged at the level debug.

    Of several Trainers of a process, the stages from before the run are counted together.
    """
    if _start.began_s is None:
        return batches
    if not logger.isEnabledFor(logging.DEBUG):
        _start.seconds, _start.began_s = {}, None
        return batches
    return chain(_first_of(batches), batches)


def _first_of(batches: Iterator[Batch]) -> Iterator[Batch]:
    with stage(FIRST_BATCH):
        first = list(islice(batches, 1))
    if first and _start.began_s is not None:
        run_s, (seconds, _start.seconds) = perf_counter() - _start.began_s, (_start.seconds, {})
        _start.began_s = None
        stages = ", ".join(f"{name} {seconds.get(name, 0.0):.3f} s" for name in (*STAGES, FIRST_BATCH))
        logger.debug("start: %s; %.3f s from train() to the first batch", stages, run_s)
    yield from first
