"""Log a message the first time only."""

from __future__ import annotations

import logging
from functools import lru_cache


def warning_once(logger: logging.Logger, message: str, *args: object) -> None:
    """Log a warning unless this logger gave the same text at this level before.

    Args:
        logger: where to log.
        message: text with `%`-placeholders for `args`, as `Logger.warning` takes it.
        args: values for the placeholders; other values make another text.
    """
    if logger.isEnabledFor(logging.WARNING):
        _log_once(logger, logging.WARNING, message % args if args else message)


def info_once(logger: logging.Logger, message: str, *args: object) -> None:
    """Log at INFO unless this logger gave the same text at this level before.

    The arguments are those of `warning_once`.
    """
    if logger.isEnabledFor(logging.INFO):
        _log_once(logger, logging.INFO, message % args if args else message)


@lru_cache(maxsize=10_000)  # bounded: a text with a counter in it must not grow without end
def _log_once(logger: logging.Logger, level: int, text: str) -> None:
    # "%s" since the text is finished: a percent sign in it is none of a placeholder's.
    logger.log(level, "%s", text, stacklevel=3)
