"""The manifests for Slurm and Kubernetes: by the variables that these set, a process knows which one it is."""

import json
import os
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tr_args import TrainingArguments
from tr_dist import LaunchEnvironment, read_environment

CLUSTERS = Path(__file__).parents[2] / "packages/tr-dist/docs/clusters"
PORT = "29500"
SCRIPT = """
import dataclasses, json, sys
from tr_args import TrainingArguments
from tr_dist import read_environment
found = read_environment()
args = TrainingArguments(output_dir=sys.argv[sys.argv.index("--output_dir") + 1], use_cpu=True)
said = [args.process_index, args.local_process_index, args.world_size, dataclasses.asdict(found), args.should_log]
sys.stdout.write(f"said {json.dumps([*said, args.should_save])}\\n")  # in one piece, also where nothing is buffered
"""


def free_port():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return str(taken.getsockname()[1])


def pytorchjob():
    """Return the command of each pod, and the variables that Kubeflow's operator sets in it."""
    job = yaml.safe_load((CLUSTERS / "pytorchjob.yaml").read_text())["spec"]
    kinds = job["pytorchReplicaSpecs"]
    pods = [kind["template"]["spec"]["containers"] for kind in kinds.values() for _ in range(kind["replicas"])]
    assert [container["name"] for (container,) in pods] == ["pytorch"] * len(pods)
    size = str(len(pods) * int(job["nprocPerNode"]))
    for number, (container,) in enumerate(pods):
        of_all = {"MASTER_ADDR": "train-master-0", "MASTER_PORT": "23456", "WORLD_SIZE": size, "RANK": str(number)}
        of_elastic = {"NNODES": str(len(pods)), "NODE_RANK": str(number), "NPROC_PER_NODE": job["nprocPerNode"]}
        of_elastic |= {"MASTER_ADDR": "train-master-0", "MASTER_PORT": "23456"}
        variables = {**of_all, **{f"PET_{name}": value for name, value in of_elastic.items()}}
        yield container["command"], {**variables, "PYTHONUNBUFFERED": "1"}


def jobset():
    """Return the command of each pod, and its variables; Kubernetes adds the index of an indexed job."""
    jobs = yaml.safe_load((CLUSTERS / "jobset.yaml").read_text())
    (job,) = jobs["spec"]["replicatedJobs"]
    spec = job["template"]["spec"]
    assert spec["completionMode"] == "Indexed"
    assert spec["parallelism"] == spec["completions"]
    (container,) = spec["template"]["spec"]["containers"]
    given = {entry["name"]: entry["value"] for entry in container["env"]}
    name = jobs["metadata"]["name"]
    assert given["FIRST_MACHINE"] == f"{name}-{job['name']}-0-0.{name}"
    assert given["MACHINES"] == str(spec["completions"])
    for number in range(spec["completions"]):
        yield container["command"], {**given, "JOB_COMPLETION_INDEX": str(number)}


@pytest.mark.parametrize("pods", [pytorchjob, jobset])
def test_pods_of_kubernetes_start_processes_that_know_their_ranks(pods, tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    port, clean = free_port(), {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    clean["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    started = []
    for command, variables in pods():
        here = {name: "127.0.0.1" if "train-m" in value else value for name, value in variables.items()}
        here = {name: port if value == "23456" else value for name, value in here.items()}
        here_command = [word.replace(PORT, port) for word in command]
        places = {"cwd": tmp_path, "env": {**clean, **here}, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        started.append(subprocess.Popen(here_command, **places, text=True))
    outputs = [process.communicate(timeout=180) for process in started]
    assert [process.returncode for process in started] == [0, 0], outputs
    said = [json.loads(line) for out, _ in outputs for line in re.findall(r"said (\[.*\])", out)]
    said.sort(key=lambda found: found[0])
    assert [found[:3] for found in said] == [[rank, rank % 2, 4] for rank in range(4)]
    for rank, (*_, environment, should_log, should_save) in enumerate(said):
        found = LaunchEnvironment(**environment)
        assert (found.rank, found.world_size, found.local_rank, found.local_world_size) == (rank, 4, rank % 2, 2)
        assert found.node_rank == rank // 2
        assert (should_log, should_save) == (rank % 2 == 0, rank == 0)


def test_a_pod_that_runs_the_script_without_a_launcher_is_refused_in_words():
    _, variables = list(pytorchjob())[1]
    with pytest.raises(
        ValueError, match="LOCAL_RANK not set beside RANK=1, .*; start with a launcher such as torchrun"
    ):
        read_environment(variables)


def sbatch():
    """Return the options of the batch script, and its command."""
    text = (CLUSTERS / "slurm.sbatch").read_text()
    options = dict(re.findall(r"^#SBATCH --([\w-]+)(?:=(.*))?$", text, re.MULTILINE))
    (line,) = [line for line in text.splitlines() if line.startswith("srun ")]
    return options, shlex.split(line)


def srun_variables(rank, machines, each):
    """Return what srun sets in one process of a step."""
    return {
        "SLURM_JOB_ID": "812",
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank % each),
        "SLURM_NODEID": str(rank // each),
        "SLURM_NTASKS": str(machines * each),
        "SLURM_STEP_NUM_TASKS": str(machines * each),
        "SLURM_TASKS_PER_NODE": f"{each}(x{machines})",
        "SLURM_STEP_TASKS_PER_NODE": f"{each}(x{machines})",
        "SLURM_STEP_NODELIST": f"gpu[007-{6 + machines:03}]",
    }


def test_processes_of_srun_know_their_ranks(monkeypatch):
    options, command = sbatch()
    assert command[0] == "srun"
    assert "train.py" in command
    assert not {"torchrun", "launch"} & set(command)  # srun starts the processes
    machines, each = int(options["nodes"]), int(options["ntasks-per-node"])
    assert (machines, each) == (2, 2)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    met = set()
    for rank in range(machines * each):
        variables = srun_variables(rank, machines, each)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        args = TrainingArguments(output_dir="out", use_cpu=True)
        assert (args.process_index, args.local_process_index, args.world_size) == (rank, rank % each, machines * each)
        found = read_environment(variables)
        assert (found.launcher, found.rank, found.world_size) == ("srun", rank, machines * each)
        assert (found.local_rank, found.local_world_size, found.node_rank) == (rank % each, each, rank // each)
        met.add((found.master_addr, found.master_port))
    ((address, port),) = met
    assert address == "gpu007"
    assert 1024 < port < 65536


def test_a_job_of_slurm_is_warned_in_time_and_goes_on_when_it_is_queued_again():
    options, command = sbatch()
    assert options["signal"].startswith("TERM@")  # without B: it goes to the processes, not to the batch script alone
    assert "requeue" in options
    assert command[command.index("--resume_from_checkpoint") + 1] == "auto"
