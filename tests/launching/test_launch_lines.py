"""Every launch line of the documentation starts real processes, which train as one process does."""

import importlib.util
import json
import sys

import pytest
from launched_jobs import ACCELERATE, SCRIPT, TRAINER, end_of, free_port, run, said, seed_file, start, training

pytestmark = [pytest.mark.launcher, pytest.mark.slow]

FSDP_FLAGS = (
    "--use_fsdp",
    "--fsdp_auto_wrap_policy=TRANSFORMER_BASED_WRAP",
    "--fsdp_transformer_layer_cls_to_wrap=BertLayer",
    "--fsdp_sharding_strategy=1",
    "--fsdp_state_dict_type=FULL_STATE_DICT",
)
LINES = {
    "torchrun": (sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone"),
    "torch.distributed.launch": (sys.executable, "-m", "torch.distributed.launch", "--nproc_per_node=2"),
    "accelerate launch": (*ACCELERATE, "--num_processes", "2", "--multi_gpu"),
    "trainer launch": (TRAINER, "launch", "--nproc", "2"),
}


def check_is_as_alone(output, errors, losses, *, strategy, tolerance=1e-5):
    (end,) = said(output)
    assert (end["world_size"], end["strategy"]) == (2, strategy)
    assert end["losses"] == pytest.approx(losses, abs=tolerance), errors


@pytest.mark.parametrize("line", LINES.values(), ids=LINES)
def test_a_line_trains_two_processes_as_one(line, tmp_path, losses_alone):
    place = [] if "--standalone" in line or TRAINER in line else [_port_option(line), free_port()]
    code, output, errors = run([*line, *place, SCRIPT, *training(tmp_path, 2)])
    assert code == 0, errors
    check_is_as_alone(output, errors, losses_alone, strategy="DDP")


def _port_option(line):
    return "--main_process_port" if "accelerate.commands.launch" in line else "--master_port"


def test_accelerates_fsdp_flags_shard_a_run_that_says_nothing_of_it(tmp_path, losses_alone):
    line = [*ACCELERATE, "--num_processes=2", *FSDP_FLAGS, "--mixed_precision=bf16"]
    # What the script is told goes before what the launcher was: bf16 would change the numbers.
    command = [*line, "--main_process_port", free_port(), SCRIPT, *training(tmp_path, 2), "--bf16", "false"]
    code, output, errors = run(command)
    assert code == 0, errors
    check_is_as_alone(output, errors, losses_alone, strategy="FSDP")
    assert "the launcher set what the arguments leave open: fsdp=['full_shard']" in errors


def test_accelerate_without_gpus_starts_one_of_two_processes_and_that_is_an_error(tmp_path):
    code, _, errors = run([*ACCELERATE, "--num_processes", "2", SCRIPT, *training(tmp_path, 2)])
    assert code == 1
    assert "it started one, as it does where it finds no GPUs" in errors


@pytest.mark.parametrize("launcher", [(TRAINER, "launch"), ACCELERATE], ids=["trainer", "accelerate"])
def test_the_fsdp_file_of_the_documentation(launcher, tmp_path, losses_alone):
    file = seed_file(tmp_path, "fsdp")
    # Its bf16 holds: the losses are near, and not equal.
    port = [] if TRAINER in launcher else ["--main_process_port", free_port()]
    code, output, errors = run([*launcher, "--config_file", file, *port, SCRIPT, *training(tmp_path, 2)])
    assert code == 0, errors
    check_is_as_alone(output, errors, losses_alone, strategy="FSDP", tolerance=0.02)
    assert said(output)[0]["losses"] != pytest.approx(losses_alone, abs=1e-6)
    assert "bf16=True (ACCELERATE_MIXED_PRECISION)" in errors


@pytest.mark.parametrize("launcher", [(TRAINER, "launch"), ACCELERATE], ids=["trainer", "accelerate"])
def test_replicas_and_shards_of_a_file_reach_the_arguments(launcher, tmp_path, losses_alone):
    file = tmp_path / "spread.json"
    sizes = {f"parallelism_config_{name}_size": 1 + (name == "dp_replicate") for name in ("dp_replicate", "dp_shard")}
    sections = {"fsdp_config": {"fsdp_version": 2}, "parallelism_config": sizes}
    file.write_text(json.dumps({"distributed_type": "FSDP", "num_processes": 2, "mixed_precision": "no", **sections}))
    port = [] if TRAINER in launcher else ["--main_process_port", free_port()]
    code, output, errors = run([*launcher, "--config_file", file, *port, SCRIPT, *training(tmp_path, 2)])
    assert code == 0, errors
    check_is_as_alone(output, errors, losses_alone, strategy="FSDP")
    assert "parallelism_config={'dp_replicate_size': 2, 'dp_shard_size': 1}" in errors


@pytest.mark.parametrize("launcher", [(TRAINER, "launch"), ACCELERATE], ids=["trainer", "accelerate"])
def test_the_two_machines_file_of_the_documentation(launcher, tmp_path, losses_alone):
    place = {"main_process_ip": "127.0.0.1", "main_process_port": free_port(), "num_processes": 2}
    jobs = []
    for rank in range(2):
        (folder := tmp_path / f"machine_{rank}").mkdir()
        file = seed_file(folder, "ddp", machine_rank=rank, **place)
        # The file's float16 needs a GPU.
        command = [*launcher, "--config_file", file, SCRIPT, *training(folder, 2), "--fp16", "false", "--use_cpu"]
        jobs.append(start(command))
    ends = [end_of(job) for job in jobs]
    assert [code for code, _, _ in ends] == [0, 0], ends
    check_is_as_alone(ends[0][1], ends[0][2], losses_alone, strategy="DDP")
    assert said(ends[1][1]) == []  # machine 1 holds rank 1


def test_float16_of_a_file_on_the_cpu_is_refused_in_words(tmp_path):
    file = seed_file(tmp_path, "ddp", num_machines=1, num_processes=2)
    code, _, errors = run([TRAINER, "launch", "--config_file", file, SCRIPT, *training(tmp_path, 2)])
    assert code == 1
    assert "fp16=True cannot train on a CPU" in errors


def test_the_deepspeed_file_of_the_documentation_reaches_the_arguments(tmp_path):
    settings = tmp_path / "ds_zero3_config.json"
    settings.write_text('{"zero_optimization": {"stage": 3}}')
    file = seed_file(tmp_path, "deepspeed_file", deepspeed_config_file=settings, num_processes=2)
    for rank in _arguments_of(file, tmp_path):
        assert rank["deepspeed"] == str(settings)
        assert rank["bf16"] is False


def test_the_deepspeed_plugin_file_of_the_documentation_reaches_the_arguments(tmp_path):
    for rank in _arguments_of(seed_file(tmp_path, "deepspeed_plugin", num_processes=2), tmp_path):
        # offload_param_device acts from stage 3 on.
        assert rank["deepspeed"]["zero_optimization"] == {"stage": 2, "offload_optimizer": {"device": "cpu"}}
        assert rank["max_grad_norm"] == 0.7
        assert rank["bf16"] is True


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed")
@pytest.mark.parametrize("launcher", [(TRAINER, "launch"), ACCELERATE], ids=["trainer", "accelerate"])
@pytest.mark.parametrize("name", ["deepspeed_file", "deepspeed_plugin"])
def test_the_deepspeed_files_of_the_documentation_train(launcher, name, tmp_path, losses_alone):
    places, tolerance = {}, 0.06  # bfloat16, and norms that are cut at 0.7
    if name == "deepspeed_file":
        places, tolerance = {"deepspeed_config_file": tmp_path / "ds_zero3_config.json"}, 1e-5
        zero = {"stage": 3, "stage3_param_persistence_threshold": 0}  # or all parameters of this model stay whole
        places["deepspeed_config_file"].write_text(json.dumps({"zero_optimization": zero, "bf16": {"enabled": "auto"}}))
    file = seed_file(tmp_path, name, num_processes=2, **places)
    port = [] if TRAINER in launcher else ["--main_process_port", free_port()]
    command = [*launcher, "--config_file", file, *port, SCRIPT, *training(tmp_path, 2)]
    code, output, errors = run(command, DS_ACCELERATOR="cpu")
    assert code == 0, errors
    check_is_as_alone(output, errors, losses_alone, strategy="DeepSpeed", tolerance=tolerance)


def test_processes_of_srun_train_as_one(tmp_path, losses_alone):
    step = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_TASKS_PER_NODE": "2"}
    place = {"SLURM_NODEID": "0", "SLURM_JOB_ID": "1", "MASTER_PORT": str(free_port())}
    command = [sys.executable, SCRIPT, *training(tmp_path, 2)]
    jobs = [start(command, **step, **place, SLURM_PROCID=str(rank), SLURM_LOCALID=str(rank)) for rank in range(2)]
    ends = [end_of(job) for job in jobs]
    assert [code for code, _, _ in ends] == [0, 0], ends
    check_is_as_alone(ends[0][1], ends[0][2], losses_alone, strategy="DDP")


def _arguments_of(file, folder):
    code, output, errors = run(
        [TRAINER, "launch", "--config_file", file, SCRIPT, "--only_arguments", *training(folder, 2)]
    )
    assert code == 0, errors
    ranks = said(output)
    assert sorted(rank["RANK"] for rank in ranks) == ["0", "1"]
    return ranks
