import os
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))  # for the modules beside this file, here and in started processes

LAUNCH_VARIABLES = {
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "LOCAL_SIZE", "GROUP_RANK", "CROSS_RANK", "CROSS_SIZE"),
    *("NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "TR_RENDEZVOUS_FILE", "CUDA_VISIBLE_DEVICES"),
    *("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"),
}


@pytest.fixture(autouse=True)
def _one_thread_and_no_launcher(monkeypatch):
    torch.set_num_threads(1)
    for name in [*LAUNCH_VARIABLES, *(name for name in os.environ if name.startswith("TORCHELASTIC_"))]:
        monkeypatch.delenv(name, raising=False)


if not hasattr(torch.cpu.Stream, "record_event"):  # torch 2.6

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(item):
        """Skip what `FSDP` refuses on the CPU with this torch, wherever a test comes to it."""
        try:
            return (yield)
        except Exception as error:
            if "on the CPU needs torch 2.7" in str(error):
                pytest.skip("needs torch 2.7: fully_shard on the CPU")
            raise
