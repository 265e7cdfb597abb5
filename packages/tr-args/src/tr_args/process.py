"""Find out which process of a launch this is, and what the arguments mean for it.

`Topology` comes from the environment variables that launchers set. `ProcessView` has the properties of training
arguments that depend on the process.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any, ClassVar, Self, cast

from tr_args.errors import ArgumentsError, Problem
from tr_args.fields import AllFields
from tr_args.types.choices import ParallelMode


@dataclass(frozen=True)
class Topology:
    """One process's rank among the others.

    Attributes:
        rank: number among all processes, from 0.
        local_rank: number among the processes of this machine, from 0.
        world_size: number of processes.
        local_world_size: number of processes on this machine.
    """

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1


def read_topology(local_rank: int = -1) -> Topology:
    """Read `RANK`, `WORLD_SIZE`, `LOCAL_RANK` and `LOCAL_WORLD_SIZE`; by default this is the only process.

    Without the first two, srun's variables count if it started several processes: `SLURM_PROCID`,
    `SLURM_STEP_NUM_TASKS`, `SLURM_LOCALID`.

    Args:
        local_rank: rank that a launcher passed on the command line instead of `LOCAL_RANK`; -1 if none.

    Raises:
        ArgumentsError: a variable is not a number, or variables contradict each other.
    """
    if _is_one_of_several_of_srun(os.environ):
        return _of_srun()
    world_size = _read_variable("WORLD_SIZE", 1, low=1)
    rank = _read_variable("RANK", 0, high=world_size - 1)
    local_world_size = _read_variable("LOCAL_WORLD_SIZE", world_size, low=1, high=world_size)
    default = local_rank if local_rank >= 0 else rank % local_world_size
    return Topology(
        rank=rank,
        local_rank=_read_variable("LOCAL_RANK", default, high=local_world_size - 1),
        world_size=world_size,
        local_world_size=local_world_size,
    )


def _is_one_of_several_of_srun(environ: Mapping[str, str]) -> bool:
    size = environ.get("SLURM_STEP_NUM_TASKS", "")
    is_several = size.isdigit() and int(size) > 1 and "SLURM_PROCID" in environ and "SLURM_LOCALID" in environ
    return is_several and "RANK" not in environ and "WORLD_SIZE" not in environ


def _of_srun() -> Topology:
    world_size = _read_variable("SLURM_STEP_NUM_TASKS", 1, low=1)
    local_rank = _read_variable("SLURM_LOCALID", 0, high=world_size - 1)
    # srun gives the processes of each machine in one list. Reading it whole is left to the launcher's side.
    return Topology(
        rank=_read_variable("SLURM_PROCID", 0, high=world_size - 1),
        local_rank=local_rank,
        world_size=world_size,
        local_world_size=max(local_rank + 1, _tasks_here(world_size)),
    )


def _tasks_here(default: int) -> int:
    text = os.environ.get("SLURM_TASKS_PER_NODE", "").partition("(")[0]
    return min(int(text), default) if text.isdigit() else default


def _read_variable(variable: str, default: int, *, low: int = 0, high: int | None = None) -> int:
    text = os.environ.get(variable)
    if not text:
        return default
    origin = f"environment {variable}"
    try:
        number = int(text)
    except ValueError:
        raise ArgumentsError([Problem(variable, text, "needs a whole number", origin)]) from None
    if number < low or (high is not None and number > high):
        end = "" if high is None else f" to {high}, as WORLD_SIZE and LOCAL_WORLD_SIZE say"
        raise ArgumentsError([Problem(variable, text, f"needs a number from {low}{end}", origin)])
    return number


# With one of these, accelerate's state starts a process group.
_LAUNCHED = ("LOCAL_RANK", "WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")


def prepare_accelerate(*, use_cpu: bool) -> None:
    """Make accelerate's `PartialState`, without which its logger raises, if it is imported and has none.

    In a launch of processes it is left to the Trainer: here it would start a process group. On XLA it would take the
    device before a strategy says over how many devices it computes, and torch_xla crashes then.
    """
    state = getattr(sys.modules.get("accelerate.logging"), "PartialState", None)
    launched = _is_one_of_several_of_srun(os.environ) or any(name in os.environ for name in _LAUNCHED)
    if state is not None and not state._shared_state and not launched and "torch_xla" not in sys.modules:
        state(cpu=use_cpu)


_LAUNCH = "it follows from how the processes are launched: by trainer launch, torchrun, or with RANK and WORLD_SIZE"


class ProcessView:
    """Properties of training arguments that depend on the process.

    Before `bind` is called, they come from the environment variables that launchers set.
    """

    # Properties -> what to do in place of an assignment.
    _follows: ClassVar[Mapping[str, str]] = MappingProxyType(
        {
            "device": "set use_cpu, or CUDA_VISIBLE_DEVICES",
            "n_gpu": "a process uses one accelerator: launch a process for each, or set CUDA_VISIBLE_DEVICES",
            "train_batch_size": "set per_device_train_batch_size",
            "eval_batch_size": "set per_device_eval_batch_size",
            "ddp_timeout_delta": "set ddp_timeout",
            "deepspeed_plugin": "set deepspeed",
            "place_model_on_device": "override the property in a subclass",
            "should_log": "set log_on_each_node",
            "should_save": "set save_on_each_node",
            "parallel_mode": _LAUNCH,
            "distributed_state": _LAUNCH,
            "world_size": _LAUNCH,
            "process_index": _LAUNCH,
            "local_process_index": _LAUNCH,
        }
    )

    def bind(
        self,
        *,
        device: Any = None,
        rank: int | None = None,
        local_rank: int | None = None,
        world_size: int | None = None,
        local_world_size: int | None = None,
    ) -> Self:
        """Set device and ranks, once the processes are set up, and return the arguments.

        Values that are not given stay as they were. They are not arguments: they are neither compared nor written.

        Args:
            device: the `torch.device` this process computes on.
            rank: number of this process among all.
            local_rank: number of this process on its machine.
            world_size: number of processes.
            local_world_size: number of processes on this machine.
        """
        state = self.__dict__.setdefault("_bound", {})
        given = {
            "device": device,
            "rank": rank,
            "local_rank": local_rank,
            "world_size": world_size,
            "local_world_size": local_world_size,
        }
        state.update({name: value for name, value in given.items() if value is not None})
        return self

    @property
    def device(self) -> Any:
        """The `torch.device` to compute on. Without `bind`, reading it imports torch and looks for a device."""
        bound = self.__dict__.get("_bound", {}).get("device")
        if bound is not None:
            return bound
        torch = importlib.import_module("torch")
        if self._args.use_cpu:
            return torch.device("cpu")
        if torch.cuda.is_available():
            return torch.device("cuda", self.local_process_index)
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")

    @property
    def n_gpu(self) -> int:
        """Number of accelerators this process uses: 0 or 1, never several."""
        return 0 if getattr(self.device, "type", "cpu") == "cpu" else 1

    @property
    def _n_gpu(self) -> int:
        """The same as `n_gpu`. Programs set it to 1 to keep off `DataParallel`, which is not here."""
        return self.n_gpu

    @_n_gpu.setter
    def _n_gpu(self, number: int) -> None:
        if number not in (0, 1):
            raise AttributeError(f"_n_gpu = {number!r} cannot be set; {self._follows['n_gpu']}")

    @property
    def deepspeed_plugin(self) -> Any:
        """`zero_stage` of the DeepSpeed configuration; None without one, and before the file of one is read."""
        config = self._args.deepspeed
        if not isinstance(config, Mapping):
            return None
        return SimpleNamespace(
            zero_stage=int(config.get("zero_optimization", {}).get("stage", 0)), deepspeed_config=config
        )

    @property
    def distributed_state(self) -> Any:
        """What accelerate's `PartialState` says of this process, and its blocks for the main process."""
        kind = "DEEPSPEED" if self._args.deepspeed else "FSDP" if self._args.fsdp else ""
        on_cpu = getattr(self.device, "type", "cpu") == "cpu"
        return SimpleNamespace(
            distributed_type=kind or ("NO" if self.world_size == 1 else "MULTI_CPU" if on_cpu else "MULTI_GPU"),
            device=self.device,
            num_processes=self.world_size,
            process_index=self.process_index,
            local_process_index=self.local_process_index,
            is_main_process=self.process_index == 0,
            is_local_main_process=self.local_process_index == 0,
            is_last_process=self.process_index == self.world_size - 1,
            main_process_first=lambda: self.main_process_first(local=False),
            local_main_process_first=self.main_process_first,
        )

    @property
    def parallel_mode(self) -> ParallelMode:
        """How this process takes part in training."""
        bound = self.__dict__.get("_bound", {}).get("device")
        if getattr(bound, "type", "") == "xla":
            return ParallelMode.TPU
        return ParallelMode.DISTRIBUTED if self.world_size > 1 else ParallelMode.NOT_PARALLEL

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return self._topology.world_size

    @property
    def process_index(self) -> int:
        """Number of this process among all, from 0."""
        return self._topology.rank

    @property
    def local_process_index(self) -> int:
        """Number of this process among those of its machine, from 0."""
        return self._topology.local_rank

    @property
    def should_log(self) -> bool:
        """Whether this process logs as a main process."""
        index = self.local_process_index if self._args.log_on_each_node else self.process_index
        return index == 0

    @property
    def should_save(self) -> bool:
        """Whether this process writes files."""
        index = self.local_process_index if self._args.save_on_each_node else self.process_index
        return index == 0

    @property
    def place_model_on_device(self) -> bool:
        """Whether a Trainer moves the model to the device; subclasses may override it."""
        return True

    @property
    def ddp_timeout_delta(self) -> timedelta:
        """How long a process waits for the others."""
        return timedelta(seconds=self._args.ddp_timeout)

    def get_process_log_level(self) -> int:
        """Return this process's level of `logging`: by default INFO on main processes, WARNING on others."""
        name = self._args.log_level if self.should_log else self._args.log_level_replica
        usual = logging.INFO if self.should_log else logging.WARNING
        return logging.DEBUG if name == "detail" else logging.getLevelNamesMapping().get(name.upper(), usual)

    def main_process_first(self, local: bool = True, desc: str = "work") -> AbstractContextManager[None]:
        """Return a context whose body the main process finishes before the others begin it.

        The processes meet in a folder, so no process group is needed. Every process must enter it.

        Args:
            local: the first process of each machine goes first; use it where machines share no files. False lets one
                process go first, and needs `output_dir` on a file system that all machines share.
            desc: name of the work, for messages.

        Raises:
            RuntimeError: (in the others) the main process failed.
            TimeoutError: some process did not come within `ddp_timeout` seconds.
        """
        # Imported here: it takes half of this package's import time, and most programs never call it.
        from tr_args.main_process_first import first

        place = self._topology
        one_machine = place.local_world_size == place.world_size
        shared = None if local or one_machine else Path(self._args.output_dir).absolute().parent
        return first(
            place.local_rank if local else place.rank,
            place.local_world_size if local else place.world_size,
            timeout_s=self._args.ddp_timeout,
            desc=desc,
            shared=shared,
        )

    @property
    def _topology(self) -> Topology:
        bound = {name: value for name, value in self.__dict__.get("_bound", {}).items() if name != "device"}
        if not bound:
            return read_topology(self._args.local_rank)
        world_size = bound.setdefault("world_size", 1)
        bound.setdefault("rank", 0)
        bound.setdefault("local_world_size", world_size)
        bound.setdefault("local_rank", bound["rank"] % bound["local_world_size"])
        return Topology(**bound)

    @property
    def _args(self) -> AllFields:
        return cast("AllFields", self)  # both are bases of TrainingArguments
