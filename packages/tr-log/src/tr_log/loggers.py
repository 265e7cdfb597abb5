"""Configure the loggers of these packages: level, rank prefix, console output, and messages that log once.

One handler per process writes the records, with the rank in front of each line. It is silent if the application has
set up logging itself. The level depends on the arguments and on the rank of the process.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from functools import cache, lru_cache
from typing import Any, TextIO

from tr_log.streams import write_text

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
        source: name of the argument or variable, for the error message.

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

    The main process of the job logs at `log_level`, a replica at `log_level_replica`. With `log_on_each_node`, the
    first process of every node is a main process; otherwise only that of the first node is.

    Args:
        log_level: a level as `parse_level` takes it, or `passive`: INFO.
        log_level_replica: a level, or `passive`: WARNING.
        log_on_each_node: whether every node has a main process.
        rank: number of this process in the job, from 0.
        local_rank: number of this process on its node, from 0.

    Raises:
        ValueError: a value is not a level.
    """
    main = _level_or(log_level, logging.INFO, "log_level")
    replica = _level_or(log_level_replica, logging.WARNING, "log_level_replica")
    is_main = local_rank == 0 if log_on_each_node else rank == 0
    return main if is_main else replica


def is_passive(level: int | str | None) -> bool:
    """Return whether `level` leaves the choice to the defaults."""
    return level is None or str(level).strip().lower() == "passive"


def _level_or(level: int | str, default: int, source: str) -> int:
    return default if is_passive(level) else parse_level(level, source=source)


def _suggestion(text: str) -> str:
    from difflib import get_close_matches  # 5 ms to import, and needed for an error only

    close = get_close_matches(text, [*LEVELS, "passive"], n=1)
    return f"; did you mean {close[0]}?" if close else ""


# Set on a written record, because the handler may get it from several loggers.
_SHOWN = "_tr_log_shown"


class RankHandler(logging.Handler):
    """Write records to a stream; with several processes, each line starts with `[rank 1/4]`.

    The records still propagate to the root logger. Once the application adds a handler there (for example with
    `logging.basicConfig`), that handler shows them in its own format, and this one is silent. This is decided for each
    record, so the order of the two set-ups does not matter. A given `stream` is always written to, unless a handler of
    the root logger writes to the same stream.

    Attributes:
        rank: number of this process, from 0.
        world_size: number of processes.
        stream: where to write; None is `sys.stderr` at the time of each record.
        followers: names of loggers outside this project that share its handler and its level.
    """

    def __init__(self) -> None:
        super().__init__()
        self.rank = _env_int("RANK", 0)
        self.world_size = _env_int("WORLD_SIZE", 1)
        self.stream: TextIO | None = None
        self.followers: set[str] = set()
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s", "%H:%M:%S"))

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as text; with several processes, every line starts with the rank."""
        text = super().format(record).rstrip("\n")
        if self.world_size <= 1:
            return text
        prefix = f"[rank {self.rank}/{self.world_size}] "
        # Every line of a traceback needs the rank, because tracebacks of several ranks mix.
        return "\n".join(prefix + line for line in text.split("\n"))

    def emit(self, record: logging.LogRecord) -> None:
        """Write the record, unless the application shows it or it was already written."""
        if getattr(record, _SHOWN, False) or self._is_shown_by_the_application(record):
            return
        setattr(record, _SHOWN, True)
        try:
            text = self.format(record)
        except Exception:  # the message and its arguments do not match
            with contextlib.suppress(ValueError):  # stderr is closed
                self.handleError(record)
            return
        write_text(self.stream if self.stream is not None else sys.stderr, text + "\n")

    def _is_shown_by_the_application(self, record: logging.LogRecord) -> bool:
        handlers = [h for h in logging.getLogger().handlers if not isinstance(h, logging.NullHandler)]
        if self.stream is not None:
            handlers = [h for h in handlers if getattr(h, "stream", None) is self.stream]
        return bool(handlers) and _reaches_root(record.name)


@cache
def rank_handler() -> RankHandler:
    """Return the one handler of this process."""
    return RankHandler()


def _env_int(variable: str, default: int) -> int:
    # Launchers set these two, but others may use the names too. Text that is not a number is ignored.
    text = os.environ.get(variable, "")
    return int(text) if text.isdecimal() else default


def _reaches_root(name: str) -> bool:
    logger: logging.Logger | None = logging.getLogger(name)
    while logger is not None and logger.parent is not None:
        if not logger.propagate:
            return False
        logger = logger.parent
    return True


ROOTS = ("tr_args", "tr_core", "tr_ckpt", "tr_optim", "tr_dist", "tr_log", "tr_all")
VERBOSITY_VARIABLE = "TR_VERBOSITY"


def configure(
    level: int | str | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    stream: TextIO | None = None,
) -> None:
    """Set level, rank prefix and console output of the packages' loggers; can be called again at any time.

    It changes the loggers named in `ROOTS` and those made with `get_logger`, never the root logger. If the application
    has set up logging itself, its handlers show the records, and nothing is written twice.

    Args:
        level: a level as `parse_level` takes it. None or `passive` keeps a level that was set before. Otherwise it is
            the environment variable TR_VERBOSITY. Without that, it is INFO on the first process of each machine
            (LOCAL_RANK 0; without that variable, rank 0) and WARNING on the others.
        rank: number of this process, from 0; None keeps it (at first: the environment's RANK, else 0).
        world_size: number of processes; None keeps it (at first: the environment's WORLD_SIZE, else 1). With 2 or
            more, each line starts with `[rank 1/4]`.
        stream: where to write; None keeps it (at first: `sys.stderr` at the time of each record).

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
    set_verbosity(_default_level() if is_passive(level) or level is None else level)


def configure_process(args: Any, *, rank: int, world_size: int) -> None:
    """Set up logging as training arguments ask for it in this process of a job.

    Where the script uses transformers, its loggers get the level of the arguments too, unless that is `passive`: then
    the level that the user or TR_VERBOSITY set stays, or is INFO on a main process and WARNING on a replica.

    Args:
        args: with `log_level`, `log_level_replica`, `should_log` and `get_process_log_level()`.
        rank: number of this process, from 0.
        world_size: number of processes.
    """
    level: int = args.get_process_log_level()
    is_given = not is_passive(args.log_level if args.should_log else args.log_level_replica)
    if is_given and "transformers" in sys.modules:
        logging.getLogger("transformers").setLevel(level)
    has_own = logging.getLogger("tr_log").level != logging.NOTSET or bool(os.environ.get(VERBOSITY_VARIABLE))
    # Without one, `configure` would inform on every machine: it knows nothing of log_on_each_node.
    keeps_own = not is_given and (args.should_log or has_own)
    configure(level=None if keeps_own else level, rank=rank, world_size=world_size)


def set_verbosity(level: int | str) -> None:
    """Set the level of the packages' loggers, and of those from `get_logger` without a level of their own.

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
    """Return the current level of the packages' loggers."""
    return logging.getLogger("tr_log").getEffectiveLevel()


def get_logger(name: str) -> logging.Logger:
    """Return the standard logger called `name`; it follows `configure` and `set_verbosity` from now on.

    Loggers of this project's packages always do. Any other, such as a script's `__main__`, gets their level, output and
    rank prefix.
    """
    logger = logging.getLogger(name)
    if name.split(".")[0] not in ROOTS:
        handler = rank_handler()
        handler.followers.add(name)
        logger.addHandler(handler)
        if logger.level == logging.NOTSET:
            logger.setLevel(logging.getLogger("tr_log").level)
    return logger


def _default_level() -> int:
    current = logging.getLogger("tr_log").level
    if current != logging.NOTSET:
        return current
    asked = os.environ.get(VERBOSITY_VARIABLE)
    if asked:
        return parse_level(asked, source=f"environment variable {VERBOSITY_VARIABLE}")
    local_rank = os.environ.get("LOCAL_RANK", "")
    place = int(local_rank) if local_rank.isdecimal() else rank_handler().rank
    return logging.INFO if place == 0 else logging.WARNING


def warning_once(logger: logging.Logger, message: str, *args: object) -> None:
    """Log a warning unless this logger has logged the same text at this level before.

    Args:
        logger: where to log.
        message: text with `%`-placeholders for `args`, as in `Logger.warning`.
        args: values for the placeholders; other values give another text.
    """
    if logger.isEnabledFor(logging.WARNING):
        _log_once(logger, logging.WARNING, message % args if args else message)


def info_once(logger: logging.Logger, message: str, *args: object) -> None:
    """Log at INFO unless this logger has logged the same text at this level before.

    The arguments are those of `warning_once`.
    """
    if logger.isEnabledFor(logging.INFO):
        _log_once(logger, logging.INFO, message % args if args else message)


@lru_cache(maxsize=10_000)  # bounded, because texts with a counter in them would fill memory
def _log_once(logger: logging.Logger, level: int, text: str) -> None:
    # The text is complete, so a percent sign in it is not a placeholder.
    logger.log(level, "%s", text, stacklevel=3)


def capture_warnings(capture: bool) -> None:
    """Send Python's warnings through the logger `py.warnings`, with the rank prefix, or stop doing so.

    Args:
        capture: True logs them at level WARNING, False lets Python print them.
    """
    logging.captureWarnings(capture)
    logger = logging.getLogger("py.warnings")
    if capture:
        logger.addHandler(rank_handler())
    else:
        logger.removeHandler(rank_handler())
