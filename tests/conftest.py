"""Let tests import `shared`; skip files whose libraries are not there; leave no process group behind."""

import importlib
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
