"""Find the commands as a shell does: by the names that installed packages give them."""

import sys
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path

TRAINER = str(Path(sys.executable).with_name("trainer"))  # a Python script


def command(name: str) -> Callable[[list[str]], int]:
    """Return the function behind `trainer NAME`."""
    [found] = entry_points(group="tr.commands", name=name)
    return found.load()
