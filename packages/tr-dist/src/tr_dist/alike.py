"""Have what is wrong on all ranks alike said once, by rank 0.

`tr_args/alike.py` is the same on purpose: neither package imports the other.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

_ERROR_FILE = "TR_LAUNCH_ERROR_FILE"  # where `trainer launch` is told of exceptions; it says each once itself
_PATIENCE_S = 5.0  # in which rank 0 fails alike, and its launcher ends the other ranks


@contextmanager
def alike_on_all_ranks() -> Iterator[None]:
    """Surround checks of what all ranks share: arguments, configuration, the kind of model; also as a decorator.

    A `ValueError` from here is raised on every rank. If nobody catches it, the ranks behind rank 0 wait a while before
    they show it: by then a launcher has ended them, for rank 0 has shown the same. So nothing is ever left unsaid.
    """
    try:
        yield
    except ValueError as error:
        if not os.environ.get(_ERROR_FILE):
            _let_rank_0_show(error)
        raise


def let_rank_0_speak() -> None:
    """Wait a while on the ranks behind rank 0."""
    if os.environ.get("RANK", "0") not in ("0", ""):
        time.sleep(_PATIENCE_S)


def _let_rank_0_show(refusal: ValueError) -> None:
    show = sys.excepthook

    def show_later(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if error is refusal:
            let_rank_0_speak()
        show(kind, error, trace)

    if os.environ.get("RANK", "0") not in ("0", ""):
        sys.excepthook = show_later
