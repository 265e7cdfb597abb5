"""Set up the loggers of this project's packages, and hand out loggers that go along with them."""

from __future__ import annotations

import logging
import os
from typing import TextIO

from tr_log.levels import is_passive, parse_level
from tr_log.rank_handler import rank_handler

ROOTS = ("tr_args", "tr_core", "tr_ckpt", "tr_optim", "tr_dist", "tr_log", "tr_all")
VARIABLE = "TR_VERBOSITY"


def configure(
    level: int | str | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    stream: TextIO | None = None,
) -> None:
    """Set level, rank prefix and console output of the packages' loggers; may be called again at any time.

    Touches the loggers named in `ROOTS` and those taken with `get_logger`, never the root logger. Where the
    application has set up logging itself, its handlers show the records and nothing is written twice.

    Args:
        level: a level as `parse_level` takes it. None or `passive` leaves a level that was set before;
            without one it is that of the environment variable TR_VERBOSITY, else INFO on the first process
            of each machine (LOCAL_RANK 0; without that variable, rank 0) and WARNING on the others.
        rank: number of this process, from 0; None keeps it (at first: the environment's RANK, else 0).
        world_size: number of processes; None keeps it (at first: the environment's WORLD_SIZE, else 1). From
            2 on each line starts with `[rank 1/4]`.
        stream: where to write; None keeps it (at first: whatever `sys.stderr` is at each record).

    Raises:
        ValueError: `level` or TR_VERBOSITY is not a level.
    """
    handler = rank_handler()
    if rank is not None:
        handler.rank = rank
    if world_size is not None:
        handler.world_size = world_size
    if stream is not None:
        handler.stream = stream
    set_verbosity(_passive_level() if is_passive(level) or level is None else level)


def set_verbosity(level: int | str) -> None:
    """Set the level of the packages' loggers, and of those taken with `get_logger` that were given no other.

    Raises:
        ValueError: `level` is neither a number from 0 up nor a level's name.
    """
    number = parse_level(level)
    handler = rank_handler()
    before = logging.getLogger("tr_log").level
    for name in (*ROOTS, *sorted(handler.followers)):
        logger = logging.getLogger(name)
        logger.addHandler(handler)
        # A level that a script chose for its own logger stays.
        if name in ROOTS or logger.level in {logging.NOTSET, before}:
            logger.setLevel(number)


def get_verbosity() -> int:
    """Return the level in force for the packages' loggers."""
    return logging.getLogger("tr_log").getEffectiveLevel()


def get_logger(name: str) -> logging.Logger:
    """Return the standard logger called `name`, which follows `configure` and `set_verbosity` from now on.

    A logger of this project's packages does so anyway; any other, such as a script's `__main__`, gets their
    level, their output and their rank prefix.
    """
    logger = logging.getLogger(name)
    if name.split(".")[0] not in ROOTS:
        handler = rank_handler()
        handler.followers.add(name)
        logger.addHandler(handler)
        if logger.level == logging.NOTSET:
            logger.setLevel(logging.getLogger("tr_log").level)
    return logger


def _passive_level() -> int:
    current = logging.getLogger("tr_log").level
    if current != logging.NOTSET:
        return current
    asked = os.environ.get(VARIABLE)
    if asked:
        return parse_level(asked, source=f"environment variable {VARIABLE}")
    local_rank = os.environ.get("LOCAL_RANK", "")
    place = int(local_rank) if local_rank.isdecimal() else rank_handler().rank
    return logging.INFO if place == 0 else logging.WARNING
