"""Show how far any long piece of work is: a bar on a terminal, a rare line elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from contextlib import contextmanager
from typing import TextIO, TypeVar

from tr_log.bars import Bar, open_bar

T = TypeVar("T")


def progress(
    iterable: Iterable[T],
    total: int | None = None,
    description: str = "working",
    *,
    stream: TextIO | None = None,
    disable: bool = False,
) -> Iterator[T]:
    """Iterate over `iterable` and show how far it is.

    On a terminal a bar is drawn and taken away at the end. Elsewhere a line is written after 10 seconds and
    then ever more rarely; what takes less leaves none.

    Args:
        iterable: what to go through.
        total: how many items there are; None asks `len(iterable)`, where there is such a thing.
        description: what is being done.
        stream: where to show it; None is `sys.stderr`.
        disable: show nothing, as on all processes but one.
    """
    if disable:
        yield from iterable
        return
    with progress_bar(description, length(iterable) if total is None else total, stream=stream) as bar:
        for item in iterable:
            yield item
            bar.advance()


@contextmanager
def progress_bar(
    description: str, total: int | None = None, *, unit: str = "it", stream: TextIO | None = None
) -> Iterator[Bar]:
    """Give an object whose `advance(amount)` counts work as done, for work that is no iteration.

    Args:
        description: what is being done.
        total: how much there is; None where that is unknown.
        unit: what is counted, for the speed; `B` for bytes.
        stream: where to show it; None is `sys.stderr`.
    """
    bar = open_bar(stream, description, total, unit=unit)
    try:
        yield bar
    finally:
        bar.close()


def length(iterable: object) -> int | None:
    """Return the number of items, or None where it cannot be known beforehand."""
    if not isinstance(iterable, Sized):
        return None
    try:
        return len(iterable)
    except TypeError:  # a loader over an endless stream has a length only by name
        return None
