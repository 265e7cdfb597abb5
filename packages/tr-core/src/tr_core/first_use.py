"""Import the names of a package when they are first used, and keep the garbage collector out of long imports."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any


def on_first_use(package: str, origins: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` for a package that imports its names when they are first used.

    Args:
        package: its name.
        origins: the module of each name.
    """

    def get(name: str) -> Any:
        if name not in origins:
            raise AttributeError(f"module {package!r} has no attribute {name!r}; it has {', '.join(sorted(origins))}")
        with without_collection():
            value = getattr(import_module(origins[name]), name)
        setattr(sys.modules[package], name, value)  # the next access does not call this function
        return value

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *origins})

    return get, names


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
        if not gc.get_freeze_count():  # else somebody keeps objects frozen
            gc.freeze()  # the two together make all objects old ones, and the counts of new ones zero
            gc.unfreeze()
        gc.enable()
