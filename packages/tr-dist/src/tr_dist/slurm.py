"""Read what srun says to each process that it starts, in the words of torch's launchers."""

from __future__ import annotations

import re
from collections.abc import Mapping

# Several steps of several jobs may share a machine: each has a port of its own in this range.
_FIRST_PORT, _NUM_PORTS = 15000, 17000


def slurm_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return RANK, WORLD_SIZE and so on of one of several processes that srun started; empty if it is none.

    Machines meet at the first of the step's list, on a port that follows from the job's number; MASTER_ADDR and
    MASTER_PORT in the environment go before that. Nothing is returned where a variable is missing or the processes are
    not spread in blocks (`--distribution=cyclic`), in which ranks do not count machine by machine.
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


def _counts(text: str) -> list[int]:
    """Return the processes of each machine out of `2(x3),1`."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            return []
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _first_machine(environ: Mapping[str, str], num_machines: int) -> str:
    """Return the first of `gpu[003-005,7]-ib,login1`; a machine alone needs no name."""
    if num_machines == 1:
        return "127.0.0.1"
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", environ.get("SLURM_STEP_NODELIST", ""))
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first[0]) if first else ""


def _port(environ: Mapping[str, str]) -> str:
    job, step = environ.get("SLURM_JOB_ID", ""), environ.get("SLURM_STEP_ID", "0")
    if not (job.isdigit() and step.isdigit()):
        return ""
    return str(_FIRST_PORT + (int(job) * 31 + int(step)) % _NUM_PORTS)
