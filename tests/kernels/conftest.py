"""Optimizers of bitsandbytes, torchao, schedulefree and others: libraries in an environment of their own."""

import sys
import warnings
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # those of its own sources, when they are compiled for the first time
    import torchao.optim  # noqa: F401


@pytest.fixture(autouse=True)
def _one_thread():
    import torch

    torch.set_num_threads(1)
