"""Train on the GPUs of this machine, one process for each, beside the CPU; skipped where there is none."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parent / "scripts" / "train_on_devices.py"
LAUNCH = "import sys; from tr_dist.launching.command import main; sys.exit(main(sys.argv[1:]))"
GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not GPUS, reason="needs a CUDA device")]


def run(strategy, precision, *words, nproc=1, **variables):
    """Return what rank 0 of a job says."""
    command = [sys.executable, "-c", LAUNCH, "--nproc", str(nproc), str(SCRIPT), strategy, precision, *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def on_cpu():
    return run("ddp", "no", "cpu")["losses"]


# Rounding to 24 or 8 bits, over six steps; under float16 first steps may be left out until the loss scale fits.
@pytest.mark.parametrize(("precision", "tolerance"), [("no", 1e-4), ("bf16", 0.05), ("fp16", 0.5)])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_all_gpus_train_over_nccl_as_the_cpu_does(strategy, precision, tolerance, on_cpu):
    found = run(strategy, precision, nproc=GPUS)
    assert (found["device"], found["world_size"]) == ("cuda:0", GPUS)
    assert "nccl" in found["backend"]
    assert found["losses"] == pytest.approx(on_cpu, rel=tolerance)


def test_an_empty_list_of_devices_is_the_cpu(on_cpu):
    found = run("ddp", "no", CUDA_VISIBLE_DEVICES="")
    assert found["device"] == "cpu"
    assert found["losses"] == on_cpu


def test_a_gpu_is_chosen_by_its_name_and_by_its_number():
    for index in range(GPUS):
        uuid = str(torch.cuda.get_device_properties(index).uuid).removeprefix("GPU-")
        found = run("ddp", "no", CUDA_VISIBLE_DEVICES=f"GPU-{uuid}")
        assert found["uuid"].removeprefix("GPU-") == uuid


@pytest.mark.skipif(GPUS < 2, reason="needs two CUDA devices")
def test_devices_of_the_launcher_are_taken_in_their_order():
    environment = {k: v for k, v in os.environ.items() if k not in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER")}
    found = []
    for devices in ("0,1", "1,0"):
        command = [sys.executable, "-c", LAUNCH, "--devices", devices, str(SCRIPT), "ddp", "no"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, check=True)
        found.append(json.loads(done.stdout.splitlines()[-1])["uuid"])
    assert found[0] != found[1]


def test_more_processes_than_gpus_are_refused():
    command = [sys.executable, "-c", LAUNCH, "--nproc", str(GPUS + 1), str(SCRIPT), "ddp", "no"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 2
    assert "each process needs its own" in done.stderr


def test_an_overflow_of_float16_leaves_out_the_update_on_the_gpu():
    from tr_dist import DDP

    with DDP(precision="fp16") as strategy:
        model = strategy.prepare(torch.nn.Linear(2, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
        applied, weights = [], []
        for value in (1.0, float("inf"), 1.0):
            with strategy.accumulate(model, sync=True):
                with strategy.autocast():
                    loss = model(torch.full((1, 2), value, device=strategy.device)).sum()
                strategy.backward(loss)
            strategy.clip_grad_norm(model, optimizer, 1.0)
            applied.append(strategy.step(optimizer))
            optimizer.zero_grad()
            weights.append(strategy.unwrap(model).weight.detach().cpu().clone())
    assert applied == [True, False, True]
    assert torch.equal(weights[1], weights[0])
    assert not torch.equal(weights[2], weights[1])


def test_a_step_without_float16_reads_nothing_back():
    from tr_dist import DDP

    with DDP() as strategy:
        model = strategy.prepare(torch.nn.Linear(2, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
        inputs = torch.ones(4, 2, device=strategy.device)
        for step in range(3):
            if step == 2:  # buckets are made, weights compared
                torch.cuda.set_sync_debug_mode("error")
            with strategy.accumulate(model, sync=True):
                strategy.backward(model(inputs).sum())
            strategy.clip_grad_norm(model, optimizer, 1.0)
            strategy.step(optimizer)
            optimizer.zero_grad()
        torch.cuda.set_sync_debug_mode("default")
