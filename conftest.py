"""What holds for the tests of all packages."""

import gc

import pytest


def pytest_collection_finish() -> None:
    """Leave what was imported out of collections of garbage, which look at all objects of torch each time."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish() -> None:
    """Undo that before the plugins say their last words."""
    gc.unfreeze()
