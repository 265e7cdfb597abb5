import importlib.util
import logging
from pathlib import Path

import pytest

from tr_log.loggers import ROOTS, rank_handler


def load(name):
    """Import a file beside this one, under a name that no other package's tests have."""
    spec = importlib.util.spec_from_file_location(f"tr_log_tests_{name}", Path(__file__).with_name(f"{name}.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def make_loop():
    return load("loop").Loop


@pytest.fixture(scope="session")
def terminal():
    return load("pseudo_terminal")


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    """A clock whose time a test sets."""
    return Clock()


@pytest.fixture(autouse=True)
def logging_as_it_was(monkeypatch):
    """Undo what a test does to the loggers, and keep this machine's variables out of it."""
    for variable in ("TR_VERBOSITY", "RANK", "LOCAL_RANK", "WORLD_SIZE", "CI", "TENSORBOARD_LOGGING_DIR"):
        monkeypatch.delenv(variable, raising=False)
    rank_handler.cache_clear()
    yield
    handler = rank_handler()
    for name in (*ROOTS, *handler.followers, "py.warnings"):
        logger = logging.getLogger(name)
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)
        logger.propagate = True
    logging.captureWarnings(False)
    rank_handler.cache_clear()
