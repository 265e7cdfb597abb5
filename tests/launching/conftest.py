import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from launched_jobs import SCRIPT, TRAINER, run, said, training
from workplace import Workplace, make_model


@pytest.fixture(scope="session")
def losses_alone(tmp_path_factory):
    """What the run's losses are in one process."""
    folder = tmp_path_factory.mktemp("alone")
    code, output, errors = run([TRAINER, "launch", SCRIPT, *training(folder, 4)])
    assert code == 0, errors
    (end,) = said(output)
    assert (end["world_size"], end["strategy"]) == (1, "SingleDevice")
    return end["losses"]


@pytest.fixture(scope="session")
def tiny_bert(tmp_path_factory):
    """A folder with a model."""
    folder = tmp_path_factory.mktemp("model")
    make_model(folder)
    return folder


@pytest.fixture(scope="session")
def accelerate_alone(tmp_path_factory, tiny_bert):
    """What the loop written for Accelerate gives in one process."""
    place = Workplace(tmp_path_factory.mktemp("accelerate"), tiny_bert)
    code, output, errors = place.run_in_shell("python train.py", 4, BATCH_SIZE="4", ACCELERATE_USE_CPU="true")
    assert code == 0, errors
    return said(output)[0]
