"""Two machines, each with a launcher of its own, in network namespaces or on loopback: what they save."""

import json
import shutil
from pathlib import Path

import pytest
from cuts import network
from machines import commands, two_machines
from rank_programs import RANK_RUN, Job

pytestmark = [pytest.mark.launcher, pytest.mark.slow]

LIMIT_S = 300
SCRIPT = Path(__file__).parent / "node_run.py"


def run_on_two(folder, launcher, nproc, script, *, on_loopback=False):
    """Return what the machines said, when they have ended with exit code 0 and left nothing."""
    with two_machines(on_loopback=on_loopback) as (machines, port), Job(folder) as job:
        for machine, command in zip(machines, commands(launcher, machines, port, nproc), strict=True):
            job.start([*command, *script], **machine.variables)
        ends = job.ends(LIMIT_S)
        assert [end.code for end in ends] == [0, 0], "\n".join(end.said[-4000:] for end in ends)
        assert job.left_over() == []
    return [end.said for end in ends]


def ends_of(said):
    return [json.loads(line) for line in said.splitlines() if line.startswith('{"')]


@pytest.mark.parametrize("launcher", ["trainer launch", "torchrun"])
def test_each_machine_saves_in_its_own_folder_and_goes_on_from_the_step_that_both_have(tmp_path, launcher):
    numbers = ["--save_steps", "4", "--save_on_each_node", "true", "--log_level", "error", "--num_train_epochs", "1"]
    # A run left alone; one that stops early; the same again, which goes on.
    settings = [[*numbers, "--resume_from_checkpoint", "auto"]]
    script = [SCRIPT, tmp_path / "machine-NODE", json.dumps(settings)]
    alone = run_on_two(tmp_path / "first", launcher, 1, script, on_loopback=launcher == "torchrun")
    saved = {machine: {path.name for path in machine.glob("checkpoint-*")} for machine in tmp_path.glob("machine-*")}
    assert sorted(path.name for path in saved) == ["machine-0", "machine-1"]
    assert all(names == {"checkpoint-4", "checkpoint-8", "checkpoint-12"} for names in saved.values())
    for machine, rank in (("machine-0", 0), ("machine-1", 1)):
        names = {path.name for path in (tmp_path / machine / "checkpoint-8").iterdir()}
        assert {"model.safetensors", "optimizer.safetensors", f"rng-{rank}.json"} <= names
    for name in ("checkpoint-12", "checkpoint-8"):  # as if the second had died in the save of step 8, and lost more
        shutil.rmtree(tmp_path / "machine-1" / name)
    shutil.rmtree(tmp_path / "machine-0" / "checkpoint-12")
    again = run_on_two(tmp_path / "again", launcher, 1, script, on_loopback=launcher == "torchrun")
    for before, after in zip(alone, again, strict=True):
        assert ends_of(after) == ends_of(before) != []


@pytest.mark.parametrize(
    ("launcher", "said"),
    [
        ("trainer launch", "machine 1: rank 1 of 2 failed first: it was ended by SIGKILL; stopping the ranks"),
        ("torchrun", "the hang watch has had no note of it for"),
    ],
)
def test_a_rank_that_dies_while_it_writes_in_the_background_ends_the_other_machine(tmp_path, launcher, said):
    arguments = json.dumps({"save_async": True, "log_level": "warning"})
    script = [RANK_RUN, tmp_path / "out", "--rows", 160, "--step_s", "0.2", "--arguments", arguments]
    fault = ["--place", "file", "--times", 9, "--how", "kill", "--rank", 1]
    try:
        with network() as (machines, port), Job(tmp_path / "job") as job:
            for machine, command in zip(machines, commands(launcher, machines, port, 1), strict=True):
                job.start([*command, *script, *fault], **machine.variables)
            ends = job.ends(LIMIT_S)  # the other waited for half an hour
    except PermissionError as error:
        pytest.skip(str(error))
    assert all(end.code not in (0, None) for end in ends), ends
    assert said in ends[0].said, ends[0].said[-4000:]
