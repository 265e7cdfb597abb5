"""Let tests import `shared`, and keep what one test does to the packages' loggers from the tests that follow."""

import importlib
import logging
import os
import re
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from types import ModuleType

import pytest

sys.path.insert(0, str(Path(__file__).parent))
# Half of what a short run in ranks takes is importing these.
_OF_RANKS = "tr_core.trainer tr_ckpt.checkpointer tr_ckpt.hub.hub_callback tr_log.report.page tr_optim.registry"
os.environ["TR_RANKS_PRELOAD"] = _OF_RANKS
# What the packages do not require: without one, the files of tests that import it are skipped.
OPTIONAL = {"accelerate", "datasets", "deepspeed", "huggingface_hub", "optuna", "peft", "torchmetrics", "transformers"}


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator:
    """Skip a file that imports an optional library which is not installed."""
    report = yield
    missing = re.search(r"ModuleNotFoundError: No module named '(\w+)", str(report.longrepr)) if report.failed else None
    if missing and missing[1] in OPTIONAL:
        report.outcome, report.longrepr = "skipped", (str(collector.path), 1, f"Skipped: needs {missing[1]}")
    return report


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


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """As many threads, as many different last bits: also where no variable says so."""
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


@pytest.fixture(autouse=True)
def no_process_group_is_left() -> Iterator[None]:
    """Fail a test that leaves a process group in this process, and leave it for the tests that follow."""
    yield
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()
        pytest.fail("the test left a process group in this process; close the strategy that joined it")


@pytest.fixture(scope="module")
def bench(request: pytest.FixtureRequest) -> Iterator[ModuleType]:
    """Import the script that the test's `BENCH` names; its modules' names are free again afterwards."""
    script: Path = request.module.BENCH
    before, folder = set(sys.modules), script.parent
    sys.path.insert(0, str(folder))
    try:
        yield importlib.import_module(script.stem)
    finally:
        sys.path.remove(str(folder))
        for name in (set(sys.modules) - before) & {path.stem for path in folder.glob("*.py")}:
            del sys.modules[name]
