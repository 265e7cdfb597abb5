import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from launched_jobs import SCRIPT, TRAINER, run, said, training


@pytest.fixture(scope="session")
def losses_alone(tmp_path_factory):
    """What the run's losses are in one process."""
    folder = tmp_path_factory.mktemp("alone")
    code, output, errors = run([TRAINER, "launch", SCRIPT, *training(folder, 4)])
    assert code == 0, errors
    (end,) = said(output)
    assert (end["world_size"], end["strategy"]) == (1, "SingleDevice")
    return end["losses"]
