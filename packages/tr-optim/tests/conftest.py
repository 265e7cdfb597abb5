import multiprocessing
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))  # for the modules beside this file, here and in started processes

# Import torch once for all processes that tests start, not in each of them.
multiprocessing.set_forkserver_preload(["torch", "torch._dynamo", "torch.distributed"])


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)
