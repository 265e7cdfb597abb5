"""Which process this is, from what torchrun, mpirun-like launchers and srun put into the environment."""

from types import SimpleNamespace

import pytest

from tr_args import TrainingArguments
from tr_args.errors import ArgumentsError
from tr_args.process import Topology, read_topology

LAUNCHED = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
SRUN = {"SLURM_STEP_NUM_TASKS": "8", "SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_TASKS_PER_NODE": "4(x2)"}


def place(monkeypatch, variables, **options):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", *SRUN):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    return read_topology(**options)


def without(variables, *names):
    return {name: value for name, value in variables.items() if name not in names}


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, Topology(0, 0, 1, 1)),
        (LAUNCHED, Topology(5, 1, 8, 4)),
        (without(LAUNCHED, "LOCAL_RANK"), Topology(5, 5 % 4, 8, 4)),
        (without(LAUNCHED, "LOCAL_WORLD_SIZE"), Topology(5, 1, 8, 8)),
        ({"RANK": "7", "WORLD_SIZE": "8"}, Topology(7, 7, 8, 8)),
        (SRUN, Topology(5, 1, 8, 4)),
        ({**SRUN, "SLURM_TASKS_PER_NODE": "4(x1),2(x2)"}, Topology(5, 1, 8, 4)),
        ({**SRUN, "SLURM_LOCALID": "6"}, Topology(5, 6, 8, 7)),  # more are here than the first machine has
        ({**SRUN, "SLURM_TASKS_PER_NODE": "16"}, Topology(5, 1, 8, 8)),
        (without(SRUN, "SLURM_TASKS_PER_NODE"), Topology(5, 1, 8, 8)),
        ({**SRUN, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, Topology(0, 0, 1, 1)),
        ({**SRUN, "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"}, Topology(1, 1, 2, 2)),
        ({**SRUN, "SLURM_STEP_NUM_TASKS": "many"}, Topology(0, 0, 1, 1)),
        (without(SRUN, "SLURM_PROCID"), Topology(0, 0, 1, 1)),
        (without(SRUN, "SLURM_LOCALID"), Topology(0, 0, 1, 1)),
        ({**SRUN, **LAUNCHED, "RANK": "6", "LOCAL_RANK": "2"}, Topology(6, 2, 8, 4)),  # torchrun in a job of srun
        ({**SRUN, "WORLD_SIZE": "2"}, Topology(0, 0, 2, 2)),
        ({**SRUN, "RANK": "0"}, Topology(0, 0, 1, 1)),
    ],
)
def test_the_place_is_what_the_launcher_says(monkeypatch, variables, expected):
    assert place(monkeypatch, variables) == expected


def test_the_command_line_says_the_local_rank_where_the_environment_does_not(monkeypatch):
    alone = without(LAUNCHED, "LOCAL_RANK")
    assert place(monkeypatch, alone, local_rank=3).local_rank == 3
    assert place(monkeypatch, alone, local_rank=0).local_rank == 0
    assert place(monkeypatch, LAUNCHED, local_rank=3).local_rank == 1


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"RANK": "8"},
            r"RANK = '8' \(environment RANK\): needs a number from 0 to 7, as WORLD_SIZE and LOCAL_WORLD_SIZE say",
        ),
        ({"RANK": "-1"}, "RANK = '-1' .*needs a number from 0 to 7"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE = '0' .*needs a number from 1$"),
        ({"LOCAL_RANK": "4"}, "LOCAL_RANK = '4' .*needs a number from 0 to 3"),
        ({"LOCAL_WORLD_SIZE": "9"}, "LOCAL_WORLD_SIZE = '9' .*needs a number from 1 to 8"),
        ({"LOCAL_WORLD_SIZE": "0"}, "LOCAL_WORLD_SIZE = '0' .*needs a number from 1 to 8"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE = 'two' .*needs a whole number"),
    ],
)
def test_variables_that_contradict_each_other_are_refused(monkeypatch, changed, message):
    with pytest.raises(ArgumentsError, match=message):
        place(monkeypatch, {**LAUNCHED, **changed})


@pytest.mark.parametrize(("name", "value"), [("SLURM_PROCID", "8"), ("SLURM_LOCALID", "8")])
def test_places_of_srun_beyond_its_processes_are_refused(monkeypatch, name, value):
    with pytest.raises(ArgumentsError, match=f"{name} = '8' .*needs a number from 0 to 7"):
        place(monkeypatch, {**SRUN, name: value})


def test_one_loading_process_is_enough_for_what_needs_one(tmp_path):
    args = TrainingArguments(str(tmp_path), dataloader_num_workers=1, dataloader_persistent_workers=True)
    assert args.dataloader_persistent_workers
    with pytest.raises(ArgumentsError, match="needs loading processes"):
        TrainingArguments(str(tmp_path), dataloader_num_workers=0, dataloader_persistent_workers=True)


@pytest.mark.parametrize(
    ("options", "variables", "device", "kind"),
    [
        ({}, {}, "cuda", "NO"),
        ({}, LAUNCHED, "cpu", "MULTI_CPU"),
        ({}, LAUNCHED, "cuda", "MULTI_GPU"),
        ({"fsdp": "full_shard"}, LAUNCHED, "cpu", "FSDP"),
        ({"deepspeed": {"zero_optimization": {"stage": 2}}}, LAUNCHED, "cpu", "DEEPSPEED"),
    ],
)
def test_the_state_of_accelerate_names_what_trains(monkeypatch, options, variables, device, kind):
    place(monkeypatch, variables)
    args = TrainingArguments("out", **options)
    args.bind(device=SimpleNamespace(type=device))
    assert args.distributed_state.distributed_type == kind


@pytest.mark.parametrize(
    ("name", "value", "instead"),
    [
        ("n_gpu", 1, "launch a process for each"),
        ("_n_gpu", 4, "launch a process for each"),
        ("train_batch_size", 4, "set per_device_train_batch_size"),
        ("device", "cpu", "set use_cpu"),
        ("world_size", 2, "how the processes are launched"),
        ("deepspeed_plugin", object(), "set deepspeed"),
        ("distributed_state", None, "how the processes are launched"),
        ("place_model_on_device", False, "override the property in a subclass"),
    ],
)
def test_what_follows_from_the_process_cannot_be_set(name, value, instead):
    with pytest.raises(AttributeError, match=f"{name} = .* cannot be set.*{instead}"):
        setattr(TrainingArguments("out"), name, value)


def test_a_program_may_say_that_it_uses_one_accelerator():
    args = TrainingArguments("out", use_cpu=True)
    args.bind(device=SimpleNamespace(type="cpu"))
    args._n_gpu = 1
    assert args._n_gpu == args.n_gpu == 0
