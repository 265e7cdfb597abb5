"""Describe a job to start: how many processes, on which machines and devices, with which variables."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field

from tr_log.formatting import printable
from tr_log.masking import mask_secrets, mask_variable, mask_words


class LaunchError(ValueError):
    """A job cannot be started; the text says what to change, and shows no secret."""

    def __str__(self) -> str:
        return printable(mask_secrets(super().__str__()), lines=True)


@dataclass(frozen=True)
class Launch:
    """The job that one call of the launcher starts on this machine, and where it meets other machines' launchers.

    Attributes:
        command: a script, or a module's name, and its arguments.
        is_module: the first word of `command` is a module's name.
        nproc: number of processes on this machine.
        min_nodes: the job does not run with fewer machines.
        max_nodes: the job uses at most this many machines.
        node_rank: number of this machine, from 0; None if machines are numbered in the order they arrive.
        endpoint: `host:port` where the machines meet; None for one machine alone, and port 0, find a
            free port.
        rdzv_id: name of the job at the endpoint, the same on all machines.
        rdzv_conf: further settings of torch's rendezvous.
        max_restarts: how often all processes may be started again after one failed.
        log_dir: folder with a log file for each process; None writes the output to the terminal.
        stop_timeout_s: seconds that processes get to end after a signal was forwarded.
        goes_on: if a process fails, the others go on, and it alone is started again.
        variables: environment variables of the processes.

    Raises:
        LaunchError: two of them contradict each other.
    """

    command: tuple[str, ...]
    is_module: bool = False
    nproc: int = 1
    min_nodes: int = 1
    max_nodes: int = 1
    node_rank: int | None = None
    endpoint: str | None = None
    rdzv_id: str | None = None
    rdzv_conf: Mapping[str, str] = field(default_factory=dict)
    max_restarts: int = 0
    log_dir: str | None = None
    stop_timeout_s: float = 300.0
    goes_on: bool = False
    variables: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, value, least in (
            ("nproc", self.nproc, 1),
            ("nnodes", self.min_nodes, 1),
            ("max_restarts", self.max_restarts, 0),
        ):
            if value < least:
                raise LaunchError(f"{name}={value} must be at least {least}")
        if self.max_nodes < self.min_nodes:
            raise LaunchError(f"nnodes={self.min_nodes}:{self.max_nodes} must be MIN:MAX with MIN <= MAX")
        if self.node_rank is not None and not 0 <= self.node_rank < self.max_nodes:
            raise LaunchError(
                f"node_rank={self.node_rank} does not exist among {self.max_nodes} machines; they count from 0"
            )
        if self.goes_on and self.max_nodes > 1:
            raise LaunchError("--elastic keeps a job on one machine going; leave out --nnodes, or --elastic")
        if self.goes_on and (self.rdzv_conf or self.rdzv_id):
            raise LaunchError("--elastic has settings and a name of its own for the rendezvous; leave out --rdzv_...")
        if self.max_nodes > 1:
            self._check_meeting()

    def _check_meeting(self) -> None:
        if self.endpoint is None:
            raise LaunchError(
                f"{self.max_nodes} machines need a place to meet: --node_rank R --master_addr HOST --master_port PORT, "
                "or --rdzv_endpoint HOST:PORT --rdzv_id NAME, the same on all of them but for the rank"
            )
        if self.min_nodes != self.max_nodes and self.node_rank is not None:
            raise LaunchError(
                f"with nnodes={self.min_nodes}:{self.max_nodes} machines come and go, so they are numbered as they "
                "come; leave out --node_rank, --master_addr and --master_port and give --rdzv_endpoint and --rdzv_id"
            )

    def described(self) -> str:
        """Return a description in lines: processes, where they meet, their variables, their command.

        Secrets are masked.
        """
        machines = str(self.max_nodes) if self.min_nodes == self.max_nodes else f"{self.min_nodes} to {self.max_nodes}"
        number = "" if self.node_rank is None else f", of which this is {self.node_rank}"
        lines = [f"processes here  {self.nproc}", f"machines        {machines}{number}"]
        if self.max_nodes > 1:
            lines.append(f"meeting at      {self.endpoint}")
        lines += [
            f"variable        {name}={mask_variable(name, value)}" for name, value in sorted(self.variables.items())
        ]
        if self.goes_on:
            lines.append("if one fails    the others go on")
        if self.max_restarts:
            lines.append(f"restarts        {self.max_restarts}")
        if self.log_dir is not None:
            lines.append(f"output          {self.log_dir}/rank_N.log")
        words = [*(["-m"] if self.is_module else []), *mask_words(self.command)]
        return "\n".join([*lines, f"command         python {shlex.join(words)}"])

    @property
    def is_plain(self) -> bool:
        """Whether it is a single process without rendezvous, restarts or log files."""
        alone = self.nproc == 1 and self.max_nodes == 1
        return alone and not self.goes_on and self.max_restarts == 0 and self.log_dir is None


def visible_devices(devices: str, environ: Mapping[str, str] | None = None) -> str:
    """Return the value of CUDA_VISIBLE_DEVICES that makes `devices` cuda:0, cuda:1, ... in the order given.

    Args:
        devices: such as `2,0`; empty for none, which means the CPU.
        environ: the present variables; None takes those of this process.

    Raises:
        LaunchError: a device is named twice, or CUDA_VISIBLE_DEVICES hides it.
    """
    names = [name.strip() for name in devices.split(",") if name.strip()]
    if len(set(names)) != len(names):
        raise LaunchError(f"devices={devices!r} names a device twice; each process needs its own")
    left = (os.environ if environ is None else environ).get("CUDA_VISIBLE_DEVICES")
    if left is not None and (missing := [name for name in names if name not in left.replace(" ", "").split(",")]):
        raise LaunchError(
            f"devices={devices!r}: CUDA_VISIBLE_DEVICES={left!r} leaves no device {', '.join(missing)}; choose among "
            "those, by the same names, or unset it"
        )
    return ",".join(names)
