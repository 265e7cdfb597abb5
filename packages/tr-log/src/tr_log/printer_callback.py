"""Print each log entry as it is."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, TextIO

from tr_log.plain import plain
from tr_log.terminal import write_line

NOT_PRINTED = ("total_flos",)


class PrinterCallback:
    """A trainer callback without a progress display: the main process prints each log entry as a dict.

    Args:
        stream: where to print; None is whatever `sys.stdout` is at that moment.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream

    def on_log(self, args: Any, state: Any, control: Any, logs: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        """Print `logs` on one line; the mapping is left as it is."""
        if logs and state.is_world_process_zero:
            shown = {name: plain(logs[name]) for name in logs if name not in NOT_PRINTED}
            stream = self._stream if self._stream is not None else sys.stdout
            write_line(stream, " ".join(str(shown).splitlines()))
