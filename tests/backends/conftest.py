"""Run every scenario on each variant of the backends that `--backend` names, and only the tests that are about them."""

import sys
import warnings
from importlib.util import find_spec
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from variants import BACKEND_OF, BACKENDS, VARIANTS, chosen, missing_device

if find_spec("torchao"):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # those of its own sources, when they are compiled for the first time
        import torchao.optim  # noqa: F401


def pytest_addoption(parser):
    parser.addoption("--backend", action="append", choices=sorted(BACKENDS), help="run on this backend only")


def pytest_generate_tests(metafunc):
    if "variant" in metafunc.fixturenames:
        backends = metafunc.config.getoption("--backend", None)
        left_out = () if backends else getattr(metafunc.module, "LEFT_TO_ITS_BACKEND", ())
        variants = [name for name in chosen(backends) if name not in left_out]
        metafunc.parametrize("variant", [marked(name) for name in variants], ids=variants)


def marked(variant):
    """Return a variant's name as a parameter that knows its backend, and whether this machine has its device."""
    backend = BACKEND_OF[variant]
    lacks = missing_device(backend)
    return pytest.param(variant, marks=[pytest.mark.column(backend), pytest.mark.skipif(bool(lacks), reason=lacks)])


@pytest.fixture
def backend(variant):
    """Return the arguments that choose a variant."""
    return VARIANTS[variant]


def pytest_collection_modifyitems(config, items):
    """Leave out the tests of other backends; a test that is about none is a mistake."""
    backends = config.getoption("--backend", None)
    here = [item for item in items if Path(__file__).parent in item.path.parents]
    empty = [item for item in here if "NOTSET" in item.name]  # no variant of what is chosen
    items[:] = [item for item in items if item not in empty]
    here = [item for item in here if item not in empty]
    if without := [item.nodeid for item in here if item.get_closest_marker("column") is None]:
        raise pytest.UsageError(f"no mark column(...) says which backend these are about: {without}")
    if backends:
        others = [item for item in here if not {*backends} & {*item.get_closest_marker("column").args}]
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if item not in others]
