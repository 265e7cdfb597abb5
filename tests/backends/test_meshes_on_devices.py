"""A mesh of GPUs, over NCCL, trains as one process on the CPU does. The same is run on the CPU, over gloo."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parent / "mesh_on_devices.py"
LAUNCH = "import sys; from tr_dist.launching.command import main; sys.exit(main(sys.argv[1:]))"
GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
DEVICES = [
    pytest.param("cpu", marks=[pytest.mark.column("mesh"), pytest.mark.slow]),
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.column("cuda"),
            pytest.mark.cuda,
            pytest.mark.skipif(GPUS < 2, reason="needs two CUDA devices"),
        ],
    ),
]


def run(folder, mesh, device, nproc):
    """Return what rank 0 of a job says."""
    words = [str(SCRIPT), str(folder), mesh, *(["cpu"] if device == "cpu" else [])]
    command = [sys.executable, "-c", LAUNCH, "--nproc", str(nproc), *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(next(line for line in done.stdout.splitlines()[::-1] if line.startswith('{"losses"')))


@pytest.mark.parametrize("mesh", ["tp=2", "sp=2", "cp=2", "cp=2,cp_comm_strategy=alltoall", "pp=2", "ep=2"])
@pytest.mark.parametrize("device", DEVICES)
def test_a_mesh_of_two_devices_trains_as_one_process_on_the_cpu_does(device, mesh, tmp_path):
    alone = run(tmp_path / "alone", "alone ep" if mesh == "ep=2" else "alone", "cpu", 1)
    found = run(tmp_path / "mesh", mesh, device, 2)
    # Sums in another order, over four steps; a GPU rounds products of matrices to fewer bits.
    # The ring computes in bfloat16 there.
    tolerance = 1e-5 if device == "cpu" else 5e-2 if "alltoall" in mesh else 5e-3
    assert found["losses"] == pytest.approx(alone["losses"], rel=tolerance)
    assert found["norms"] == pytest.approx(alone["norms"], rel=10 * tolerance)
    assert found["device"].startswith(device)
    assert ("nccl" in found["backend"]) == (device == "cuda")
    assert (found["mfu"] is None) == (device == "cpu")  # of which no peak is known
    assert found["mfu"] is None or 0 < found["mfu"] < 1
