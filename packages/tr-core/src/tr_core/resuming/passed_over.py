"""Collect what a checkpointer says about the checkpoints that it passes over."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def collect_warnings(checkpointer: Any) -> Iterator[list[str]]:
    """Collect what a checkpointer's package logs as a warning meanwhile: so a checkpoint that is passed over shows."""
    found: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger(type(checkpointer).__module__.partition(".")[0])
    level = logger.level
    logger.addHandler(handler)
    if not logger.isEnabledFor(logging.WARNING):
        logger.setLevel(logging.WARNING)
    try:
        yield found
    finally:
        logger.setLevel(level)
        logger.removeHandler(handler)
