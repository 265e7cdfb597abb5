"""Know which process this is among those of one launch, from what launchers put into the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from tr_args.errors import ArgumentsError, Problem


@dataclass(frozen=True)
class Topology:
    """One process's place among the others.

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


def from_environment(local_rank: int = -1) -> Topology:
    """Return the place that `RANK`, `WORLD_SIZE`, `LOCAL_RANK` and `LOCAL_WORLD_SIZE` give; alone by default.

    Without the first two, what srun says to one of several processes counts (`SLURM_PROCID`, `SLURM_STEP_NUM_TASKS`,
    `SLURM_LOCALID`).

    Args:
        local_rank: what a launcher passed on the command line instead of `LOCAL_RANK`; -1 if nothing.

    Raises:
        ArgumentsError: a variable is no number, or they contradict each other.
    """
    if _is_one_of_several_of_srun(os.environ):
        return _of_srun()
    world_size = _read("WORLD_SIZE", 1, low=1)
    rank = _read("RANK", 0, high=world_size - 1)
    local_world_size = _read("LOCAL_WORLD_SIZE", world_size, low=1, high=world_size)
    default = local_rank if local_rank >= 0 else rank % local_world_size
    return Topology(
        rank=rank,
        local_rank=_read("LOCAL_RANK", default, high=local_world_size - 1),
        world_size=world_size,
        local_world_size=local_world_size,
    )


def _is_one_of_several_of_srun(environ: Mapping[str, str]) -> bool:
    size = environ.get("SLURM_STEP_NUM_TASKS", "")
    is_several = size.isdigit() and int(size) > 1 and "SLURM_PROCID" in environ and "SLURM_LOCALID" in environ
    return is_several and "RANK" not in environ and "WORLD_SIZE" not in environ


def _of_srun() -> Topology:
    world_size = _read("SLURM_STEP_NUM_TASKS", 1, low=1)
    local_rank = _read("SLURM_LOCALID", 0, high=world_size - 1)
    # How many are here is told for all machines at once, which only whoever joins the processes has to read.
    return Topology(
        rank=_read("SLURM_PROCID", 0, high=world_size - 1),
        local_rank=local_rank,
        world_size=world_size,
        local_world_size=max(local_rank + 1, _tasks_here(world_size)),
    )


def _tasks_here(default: int) -> int:
    text = os.environ.get("SLURM_TASKS_PER_NODE", "").partition("(")[0]
    return min(int(text), default) if text.isdigit() else default


def _read(variable: str, default: int, *, low: int = 0, high: int | None = None) -> int:
    text = os.environ.get(variable)
    if text is None:
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
