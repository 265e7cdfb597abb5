"""What holds for the tests of all packages."""

import gc
import logging
import sys
from collections.abc import Iterator

import pytest


def pytest_collection_finish() -> None:
    """Leave what was imported out of collections of garbage, which look at all objects of torch each time."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish() -> None:
    """Undo that before the plugins say their last words."""
    gc.unfreeze()


def of_the_packages() -> list[logging.Logger]:
    """Return the packages' loggers, as far as there are any yet."""
    known = logging.Logger.manager.loggerDict
    return [logger for name, logger in known.items() if isinstance(logger, logging.Logger) and name.startswith("tr_")]


@pytest.fixture(autouse=True)
def loggers_as_in_a_new_process() -> Iterator[None]:
    """Take back levels and handlers, which a Trainer sets for the process; what is said once may be said again.

    Before a test too: a Trainer may be built where a module is imported.
    """
    before = {logger: logger.handlers[:] for logger in of_the_packages()}
    for logger in before:
        logger.level, logger.propagate = logging.NOTSET, True
    logging.Logger.manager._clear_cache()
    yield
    logging.disable(logging.NOTSET)  # benches are quiet, and some tests call one
    for logger in of_the_packages():
        logger.level, logger.propagate, logger.handlers = logging.NOTSET, True, before.get(logger, [])
    logging.Logger.manager._clear_cache()
    if "tr_log" in sys.modules:
        from tr_log.testing import forget_once

        forget_once()
