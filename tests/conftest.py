"""Keep what one test does to the packages' loggers from the tests that follow, whichever package those are of."""

import logging
import sys
from collections.abc import Iterator

import pytest


def of_the_packages() -> list[logging.Logger]:
    """Return the packages' loggers, as far as there are any yet."""
    known = logging.Logger.manager.loggerDict
    return [logger for name, logger in known.items() if isinstance(logger, logging.Logger) and name.startswith("tr_")]


@pytest.fixture(autouse=True)
def loggers_as_they_were() -> Iterator[None]:
    """Put levels and handlers back: a Trainer sets them for the process. What is said once may be said again."""
    before = {logger: (logger.level, logger.propagate, logger.handlers[:]) for logger in of_the_packages()}
    yield
    for logger in of_the_packages():
        logger.level, logger.propagate, logger.handlers = before.get(logger, (logging.NOTSET, True, []))
    logging.Logger.manager._clear_cache()
    if once := sys.modules.get("tr_log.once"):
        once._log_once.cache_clear()
