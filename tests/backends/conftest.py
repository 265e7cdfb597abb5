"""Run every scenario on each variant of the backends that `--backend` names."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from variants import VARIANTS, chosen


def pytest_addoption(parser):
    parser.addoption("--backend", action="append", choices=sorted(VARIANTS), help="run on this backend only")


def pytest_generate_tests(metafunc):
    if "backend" in metafunc.fixturenames:
        variants = chosen(metafunc.config.getoption("--backend", None))
        metafunc.parametrize("backend", [options for _, options in variants], ids=[name for name, _ in variants])
