"""Choose how progress is shown: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

import sys
from typing import Protocol, TextIO

from tr_log.screen import Screen
from tr_log.terminal import is_terminal
from tr_log.terminal_bar import TerminalBar
from tr_log.text_bar import TextBar


class Bar(Protocol):
    """What shows progress, however it does."""

    def advance(self, amount: int = 1) -> None:
        """Count `amount` units as done."""
        ...

    def close(self) -> None:
        """Show it no longer."""
        ...


def open_bar(stream: TextIO | None, description: str, total: int | None, *, unit: str = "it") -> Bar:
    """Return what fits `stream`, None being `sys.stderr`: a bar on a terminal, lines elsewhere."""
    where = stream if stream is not None else sys.stderr
    if where is not None and is_terminal(where):
        return TerminalBar(Screen.on(where), description, total, unit=unit)
    return TextBar(where, description, total, unit=unit)
