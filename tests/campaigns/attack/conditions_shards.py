"""A checkpoint of 1,000 ranks, each with a shard: saved, listed, verified, restored and exported by one process."""

from __future__ import annotations

import resource
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from children import End, in_ranks
from crash_training import Held as HeldState
from runner import HUNG, WRONG_END, Tally
from shared.commands import command
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from tr_ckpt import Checkpointer, manifest, names, plan
from tr_ckpt.files import FileRecord
from tr_ckpt.plan import FileToWrite, Held
from tr_ckpt.ranks import Ranks
from tr_ckpt.sharded import export
from tr_ckpt.testing import verify

RANKS, ROWS, COLUMNS = 1000, 2, 4
OPEN_FILES = 256
ASSIGNED = 20  # ranks that find out what they write as they do in life
LIMIT_S = 60.0


def many_shards(folder: Path) -> Tally:
    """Count what is done with a checkpoint of 1,000 ranks by a process that may open 256 files."""
    tally = Tally()
    saved = folder / "run" / "checkpoint-2"
    saved.mkdir(parents=True)
    _try(tally, folder, "saved", lambda: _save(saved))
    whole = torch.arange(RANKS * ROWS * COLUMNS, dtype=torch.float32).reshape(-1, COLUMNS)
    _try(tally, folder, "listed", lambda: _expect(Checkpointer(folder / "run").steps(), [2]))
    _try(tally, folder, "verified", lambda: verify(saved))
    _try(tally, folder, "restored", lambda: _restore(folder / "run", whole))
    _try(tally, folder, "exported", lambda: export(saved, folder / "model"))
    _try(tally, folder, "shown by the command", lambda: _expect(command("ckpt")(["ls", str(folder / "run")]), 0))
    _try(tally, folder, "verified by the command", lambda: _expect(command("ckpt")(["verify", str(saved)]), 0))
    return tally


def _try(tally: Tally, folder: Path, what: str, work: Any) -> None:
    tally.tried += 1
    began = time.monotonic()

    def limited(rank: int, gather: Any) -> bool:
        resource.setrlimit(resource.RLIMIT_NOFILE, (OPEN_FILES, OPEN_FILES))
        work()
        return True

    [end] = in_ranks(limited, 1, 2 * LIMIT_S)
    if _ended(tally, what, end):
        tally.ends[what] += 1
    if time.monotonic() - began > LIMIT_S:
        tally.wrong(HUNG, f"{what}: took {time.monotonic() - began:.0f} s")


def _ended(tally: Tally, what: str, end: End) -> bool:
    if end.answer is None:
        tally.wrong(HUNG if end.hung else WRONG_END, f"not {what}: {end}\n{end.output[-1500:]}")
    return end.answer is not None


def _expect(found: Any, right: Any) -> None:
    if found != right:
        raise AssertionError(f"{found!r}, not {right!r}")


def _taken(rank: int) -> Held:
    """Return what one rank takes of a tensor whose rows are shared out; no other rank is there."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=RANKS)
    try:
        mesh = init_device_mesh("cpu", (RANKS,))
        shard = DTensor.from_local(_rows(rank), mesh, [Shard(0)], run_check=False)
        held = plan.hold("model", {"weight": shard}, _ranks(rank))
        assert held is not None
        return held
    finally:
        dist.destroy_process_group()


def _ranks(rank: int) -> Ranks:
    return Ranks(rank, RANKS, lambda value: [value] * RANKS)


def _save(folder: Path) -> None:
    taken = [_taken(rank) for rank in range(RANKS)]
    shares = [each.share for each in taken]
    written = []
    for rank in range(RANKS):
        if rank < ASSIGNED:
            planned = plan.files_of("model", taken[rank], shares, _ranks(rank))
        else:  # each looks at all shares, which 1,000 ranks do at once and one process does not
            planned = [FileToWrite("model", names.shard_name("model", rank), {"weight": _rows(rank)})]
        planned += plan.files_of("rng", plan.hold("rng", {"rank": rank}, _ranks(rank)), [None], _ranks(rank))
        of_rank: dict[str, dict[str, FileRecord]] = {}
        for file in planned:
            of_rank.setdefault(file.part, {})[file.name] = file.write(folder)
        written.append(of_rank)
    manifest.write(folder, manifest.describe(2, RANKS, written, sequence=1))


def _rows(rank: int) -> torch.Tensor:
    first = rank * ROWS * COLUMNS
    return torch.arange(first, first + ROWS * COLUMNS, dtype=torch.float32).reshape(ROWS, COLUMNS)


def _restore(folder: Path, whole: torch.Tensor) -> None:
    part = HeldState(weight=torch.zeros(RANKS * ROWS, COLUMNS))
    _expect(Checkpointer(folder).restore({"model": part}), 2)
    _expect(torch.equal(part.state["weight"], whole), True)
