"""Choose the logging level of a process from the levels asked for and its place among the others."""

from __future__ import annotations

import logging

LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "critical": logging.CRITICAL,
}


def parse_level(level: int | str, *, source: str = "level") -> int:
    """Return a logging level as its number.

    Args:
        level: a number from 0 up, or one of `debug, info, warning, error, critical` in any case.
        source: what the value belongs to, for the message of the error.

    Raises:
        ValueError: `level` is neither.
    """
    text = str(level).strip().lower()
    if text in LEVELS:
        return LEVELS[text]
    if text.isdecimal():
        return int(text)
    raise ValueError(
        f"{source}={level!r} is not a logging level; it must be one of {', '.join(LEVELS)} "
        f"or a number from 0 up{_suggestion(text)}"
    )


def process_log_level(
    log_level: int | str,
    log_level_replica: int | str,
    log_on_each_node: bool,
    *,
    rank: int,
    local_rank: int,
) -> int:
    """Return the logging level of one process of a job.

    The main process of the job logs at `log_level`, a replica at `log_level_replica`. With `log_on_each_node`
    the first process of every node counts as a main process, otherwise only that of the first node does.

    Args:
        log_level: a level as `parse_level` takes it, or `passive`: INFO.
        log_level_replica: a level, or `passive`: WARNING.
        log_on_each_node: whether every node has a main process.
        rank: number of this process in the job, from 0.
        local_rank: number of this process on its node, from 0.

    Raises:
        ValueError: a level is none.
    """
    main = _level_or(log_level, logging.INFO, "log_level")
    replica = _level_or(log_level_replica, logging.WARNING, "log_level_replica")
    is_main = local_rank == 0 if log_on_each_node else rank == 0
    return main if is_main else replica


def is_passive(level: int | str | None) -> bool:
    """Tell whether `level` leaves the choice to the defaults."""
    return level is None or str(level).strip().lower() == "passive"


def _level_or(level: int | str, default: int, source: str) -> int:
    return default if is_passive(level) else parse_level(level, source=source)


def _suggestion(text: str) -> str:
    from difflib import get_close_matches  # 5 ms to import, and needed for an error only

    close = get_close_matches(text, [*LEVELS, "passive"], n=1)
    return f"; did you mean {close[0]}?" if close else ""
