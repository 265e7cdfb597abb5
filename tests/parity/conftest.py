"""Compare this Trainer with the one of transformers, run by run, in one process."""

import gc
import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(1, str(Path(__file__).parent.parent))  # for what other tests use too
pytest.register_assert_rewrite("parity_harness")
# Read when transformers is imported: nothing is looked up on the network, and its progress is not printed.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"


def pytest_configure(config):
    config.addinivalue_line(
        "markers", "reference_fails: shows a fault of the reference, and that this Trainer does not have it"
    )


@pytest.fixture(autouse=True)
def _quick_garbage_collection():
    """Spare the collector all that is imported: the reference calls it at the start of every run, for half a second."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def parity(tmp_path):
    """Train one scenario with both trainers, compare everything, and return both outcomes."""
    from parity_harness import Scenario, assert_same, run_both

    def compare(model, train, evaluation=None, *, but=(), options=None, callbacks=tuple, subclass=None, **arguments):
        scenario = Scenario(model, train, evaluation, arguments, options or {}, callbacks)
        scenario.subclass = subclass or scenario.subclass
        reference, ours = run_both(scenario, tmp_path)
        assert_same(reference, ours, but=but)
        return reference, ours

    return compare
