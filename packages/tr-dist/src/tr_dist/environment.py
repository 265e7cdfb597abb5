"""Read from the environment variables which process of a job this is, and choose its device.

The variables have to agree. Those of srun are read too, and translated to the names of torch's variables.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import torch

_logger = logging.getLogger(__name__)

ELASTIC_RUN = "TR_ELASTIC_RUN"
"""Variable with the name of a run whose processes come and go, of `trainer launch --elastic`."""

# Several steps of several jobs may share a machine: each has its own port in this range.
_FIRST_PORT, _NUM_PORTS = 15000, 17000


def slurm_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return RANK, WORLD_SIZE and so on for a process that srun started; empty if srun started only one or none.

    Machines meet at the first of the step's list, on a port that follows from the job's number; MASTER_ADDR and
    MASTER_PORT in the environment take precedence. The result is empty if a variable is missing or the processes are
    not spread in blocks (`--distribution=cyclic`), because ranks then do not count machine by machine.
    """
    needed = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS", "SLURM_NODEID", "SLURM_STEP_TASKS_PER_NODE")
    if not all(environ.get(name) for name in needed):
        return {}
    rank, local_rank, size, node = (environ[name] for name in needed[:4])
    counts = _counts(environ["SLURM_STEP_TASKS_PER_NODE"])
    if not all(text.isdigit() for text in (rank, local_rank, size, node)) or int(size) < 2 or int(node) >= len(counts):
        return {}
    if int(rank) != sum(counts[: int(node)]) + int(local_rank):
        return {}
    found = {
        "RANK": rank,
        "WORLD_SIZE": size,
        "LOCAL_RANK": local_rank,
        "LOCAL_WORLD_SIZE": str(counts[int(node)]),
        "GROUP_RANK": node,
        "MASTER_ADDR": environ.get("MASTER_ADDR") or _first_machine(environ, len(counts)),
        "MASTER_PORT": environ.get("MASTER_PORT") or _port(environ),
    }
    return found if all(found.values()) else {}


def _has_own_devices(environ: Mapping[str, str], rank: int | None, local_rank: int | None) -> bool:
    """Whether srun started this very process with devices of its own, such as by `--gpus-per-task=1`."""
    if (environ.get("SLURM_PROCID"), environ.get("SLURM_LOCALID")) != (str(rank), str(local_rank)):
        return False  # torchrun below srun: the devices are those of all its ranks
    is_bound = re.search(r"(?:^|,)(?:single:1$|per_task:)", environ.get("SLURM_GPU_BIND", ""))
    per_task = "gpu" in environ.get("SLURM_TRES_PER_TASK", "") or environ.get("SLURM_GPUS_PER_TASK")
    return bool(is_bound or per_task or environ.get("SLURM_NTASKS_PER_GPU") == "1")


def _counts(text: str) -> list[int]:
    """Parse the processes of each machine from `2(x3),1`."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            return []
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _first_machine(environ: Mapping[str, str], num_machines: int) -> str:
    """Return the first machine of `gpu[003-005,7]-ib,login1`; a single machine needs no name."""
    if num_machines == 1:
        return "127.0.0.1"
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", environ.get("SLURM_STEP_NODELIST", ""))
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first[0]) if first else ""


def _port(environ: Mapping[str, str]) -> str:
    job, step = environ.get("SLURM_JOB_ID", ""), environ.get("SLURM_STEP_ID", "0")
    if not (job.isdigit() and step.isdigit()):
        return ""
    return str(_FIRST_PORT + (int(job) * 31 + int(step)) % _NUM_PORTS)


# The variables (number of processes, rank) of launchers that start processes without setting RANK.
_OTHER_LAUNCHERS = (
    ("srun", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
    ("mpirun", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    ("mpirun", "PMI_SIZE", "PMI_RANK"),
)


@dataclass(frozen=True)
class LaunchEnvironment:
    """The rank of this process, the number of processes, and where they meet.

    Attributes:
        launcher: the probable launcher: `torchrun`, `accelerate launch`, `deepspeed`, `srun`,
            `environment` (the variables are set by an unknown program) or `none`.
        rank: number of this process among all, from 0.
        world_size: number of processes.
        local_rank: number of this process on its machine, from 0.
        local_world_size: number of processes on this machine, or None if the launcher does not set it.
        node_rank: number of this machine, from 0, or None if the launcher does not set it.
        master_addr: host where the processes meet; None in a job of one.
        master_port: its TCP port.
        restart_count: how often an elastic launcher has restarted the processes so far.
        agent_store: whether the launcher itself serves `master_port`, so that rank 0 must not.
        rendezvous_file: file on a shared disk through which the processes meet, instead of `master_addr`.
        own_devices: whether each process was given devices that the others of its machine do not see.
    """

    launcher: str = "none"
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int | None = 1
    node_rank: int | None = 0
    master_addr: str | None = None
    master_port: int | None = None
    restart_count: int = 0
    agent_store: bool = False
    rendezvous_file: str | None = None
    own_devices: bool = False


def read_environment(environ: Mapping[str, str] | None = None) -> LaunchEnvironment:
    """Return the launch environment from the launcher's variables.

    It reads RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE (deepspeed: LOCAL_SIZE), GROUP_RANK (deepspeed:
    CROSS_RANK; also NODE_RANK), MASTER_ADDR, MASTER_PORT, TORCHELASTIC_RESTART_COUNT,
    TORCHELASTIC_USE_AGENT_STORE, and TR_RENDEZVOUS_FILE, which replaces MASTER_ADDR and
    MASTER_PORT. Without RANK and WORLD_SIZE the variables of srun (SLURM_PROCID and others) apply; without those
    this process is alone.

    Args:
        environ: the variables; None reads those of this process.

    Raises:
        ValueError: variables are missing, malformed or contradict each other; the message lists every
            problem.
    """
    reader = _Reader(os.environ if environ is None else environ)
    environment = reader.read()
    if reader.problems:
        raise ValueError(
            "the launch environment cannot be used:\n" + "\n".join(f"  {problem}" for problem in reader.problems)
        )
    return environment


def started_processes(environ: Mapping[str, str]) -> str:
    """Return `WORLD_SIZE` where a launcher started several processes, else an empty string."""
    number = environ.get("WORLD_SIZE", "")
    return "" if number == "1" else number


class _Reader:
    """Reads the variables once, and collects problems instead of stopping at the first."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ
        self._is_slurm = False
        self.problems: list[str] = []

    def read(self) -> LaunchEnvironment:
        if "RANK" not in self._environ and "WORLD_SIZE" not in self._environ:
            slurm = slurm_variables(self._environ)
            if not slurm:
                self._check_alone()
                return LaunchEnvironment()
            self._environ = {**self._environ, **slurm}
            self._is_slurm = True
        rank, world_size = self._number("RANK"), self._number("WORLD_SIZE", at_least=1)
        local_rank = self._number("LOCAL_RANK")
        environment = LaunchEnvironment(
            launcher=self._launcher(),
            rank=rank or 0,
            world_size=world_size or 1,
            local_rank=local_rank or 0,
            local_world_size=self._local_world_size(),
            node_rank=self._node_rank(),
            master_addr=self._environ.get("MASTER_ADDR"),
            master_port=self._number("MASTER_PORT", at_least=1, at_most=65535),
            restart_count=self._number("TORCHELASTIC_RESTART_COUNT") or 0,
            agent_store=self._environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            rendezvous_file=self._environ.get("TR_RENDEZVOUS_FILE"),
            own_devices=_has_own_devices(self._environ, rank, local_rank),
        )
        self._check_complete(environment.world_size)
        if not self.problems:
            self._check_consistent(environment)
        return environment

    def _launcher(self) -> str:
        if self._is_slurm:
            return "srun"
        if "TORCHELASTIC_RUN_ID" in self._environ:
            accelerate = any(name.startswith("ACCELERATE_") for name in self._environ)
            return "accelerate launch" if accelerate else "torchrun"
        return "deepspeed" if "CROSS_SIZE" in self._environ else "environment"

    def _number(self, name: str, *, at_least: int = 0, at_most: int | None = None) -> int | None:
        text = self._environ.get(name)
        if text is None:
            return None
        allowed = f"a whole number from {at_least}" + (f" to {at_most}" if at_most is not None else "")
        try:
            number = int(text)
        except ValueError:
            self.problems.append(f"{name}={text!r} is not a number; needs {allowed}")
            return None
        if number < at_least or (at_most is not None and number > at_most):
            self.problems.append(f"{name}={number} is out of range; needs {allowed}")
            return None
        return number

    def _local_world_size(self) -> int | None:
        given = {
            name: self._number(name, at_least=1) for name in ("LOCAL_WORLD_SIZE", "LOCAL_SIZE") if name in self._environ
        }
        if len(set(given.values())) > 1:
            listed = " and ".join(f"{name}={self._environ[name]}" for name in given)
            self.problems.append(f"{listed} contradict each other; unset the one that the launcher did not set")
        return next(iter(given.values()), None)

    def _node_rank(self) -> int | None:
        # NODE_RANK is last: it is often the cluster's numbering, while an elastic launcher numbers by order of arrival.
        for name in ("GROUP_RANK", "CROSS_RANK", "NODE_RANK"):
            if name in self._environ:
                return self._number(name)
        return None

    def _check_alone(self) -> None:
        if "LOCAL_RANK" in self._environ:
            self.problems.append(
                f"LOCAL_RANK={self._environ['LOCAL_RANK']} is set, but RANK and WORLD_SIZE are not; start "
                "with a launcher such as torchrun, or unset LOCAL_RANK to train in one process"
            )
        for launcher, size_name, rank_name in _OTHER_LAUNCHERS:
            size = self._environ.get(size_name, "1")
            if size.isdigit() and int(size) > 1:
                self.problems.append(
                    f"{launcher} started {size} processes ({size_name}={size}, {rank_name}="
                    f"{self._environ.get(rank_name, 'unset')}), but RANK and WORLD_SIZE are not set, so each "
                    "would train a model of its own; let it start torchrun once per machine, or set RANK, "
                    "WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT"
                )
                return

    def _check_complete(self, world_size: int) -> None:
        needed = ["RANK", "WORLD_SIZE"]
        if world_size > 1:
            needed.append("LOCAL_RANK")
            if "TR_RENDEZVOUS_FILE" not in self._environ:
                needed += ["MASTER_ADDR", "MASTER_PORT"]
        missing = [name for name in needed if not self._environ.get(name)]
        if missing:
            present = ", ".join(f"{name}={self._environ[name]}" for name in needed if self._environ.get(name))
            self.problems.append(
                f"{', '.join(missing)} not set beside {present or 'the others'}; start with a launcher such "
                "as torchrun, which sets them all, or unset RANK and WORLD_SIZE to train in one process"
            )

    def _check_consistent(self, environment: LaunchEnvironment) -> None:
        rank, world_size = environment.rank, environment.world_size
        local_rank, local_world_size = environment.local_rank, environment.local_world_size
        if rank >= world_size:
            self.problems.append(
                f"RANK={rank} does not exist among WORLD_SIZE={world_size} processes; ranks count from 0"
            )
        if local_rank > rank:
            self.problems.append(f"LOCAL_RANK={local_rank} is greater than RANK={rank}; ranks count machine by machine")
        if local_world_size is None:
            return
        if local_rank >= local_world_size:
            self.problems.append(
                f"LOCAL_RANK={local_rank} does not exist among the {local_world_size} processes of this "
                "machine (LOCAL_WORLD_SIZE); ranks count from 0"
            )
        if local_world_size > world_size:
            self.problems.append(
                f"LOCAL_WORLD_SIZE={local_world_size} is more than WORLD_SIZE={world_size}, which counts all machines"
            )
        elif local_world_size == world_size and local_rank != rank:
            self.problems.append(
                f"RANK={rank} and LOCAL_RANK={local_rank} differ, though all {world_size} processes are on this machine"
            )


def rank_device(environment: LaunchEnvironment, *, use_cpu: bool = False) -> torch.device:
    """Return the CUDA device whose index is LOCAL_RANK, or the CPU on request or if no CUDA device is visible.

    Where srun gave each task devices of its own (`--gpus-per-task=1`), the index starts again at the number of these.
    Indices count the devices that CUDA_VISIBLE_DEVICES leaves visible, in its order. A process without a launcher uses
    the first, and logs once that the others stay idle.

    Raises:
        ValueError: there are CUDA devices, but fewer than processes on this machine; or there is an Apple device, over
            which ranks cannot communicate.
    """
    if use_cpu:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        if torch.backends.mps.is_available():
            raise ValueError(
                f"rank {environment.rank} of {environment.world_size} cannot compute on this machine's mps device: "
                "neither gloo nor nccl carries its tensors, and there is one for all processes; train in one process "
                "with strategy='mps', or in several with use_cpu=True"
            )
        return torch.device("cpu")
    visible, local_rank = torch.cuda.device_count(), environment.local_rank
    if environment.own_devices:
        local_rank %= visible
    if local_rank >= visible:
        raise ValueError(
            f"LOCAL_RANK={local_rank} has no CUDA device: {visible} visible here ({_choice()}), and each process "
            f"needs its own; start at most {visible} on this machine, make more devices visible, or set "
            "use_cpu=True (trainer doctor shows the visible ones)"
        )
    if environment.launcher == "none" and environment.world_size == 1 < visible:
        _log_idle_devices(visible)
    return torch.device("cuda", local_rank)


def lone_device(*, use_cpu: bool = False) -> torch.device:
    """Return the device of a process that trains alone: the first CUDA device, the Apple device, or the CPU."""
    if not use_cpu and not torch.cuda.is_available() and torch.backends.mps.is_available():
        return torch.device("mps")
    return rank_device(LaunchEnvironment(), use_cpu=use_cpu)


@cache  # once a process
def _log_idle_devices(visible: int) -> None:
    _logger.warning(
        "%d CUDA devices are visible (%s), and this process uses one, cuda:0; to use all, start a process for each: "
        "trainer launch --nproc %d SCRIPT, or torchrun --nproc-per-node %d SCRIPT",
        visible, _choice(), visible, visible,
    )  # fmt: skip


def _choice() -> str:
    choice = os.environ.get("CUDA_VISIBLE_DEVICES")
    return f"CUDA_VISIBLE_DEVICES={choice!r}" if choice is not None else "CUDA_VISIBLE_DEVICES is not set"
