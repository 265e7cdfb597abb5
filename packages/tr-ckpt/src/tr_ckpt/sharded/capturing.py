"""Save parts whose state holds DTensors: every rank writes its own shards, and nothing is gathered.

Each rank lists what it holds (`Share`). The ranks exchange their shares (see `TakenStates` in `saving.py`), and from
the same shares every rank computes the same plan, with the planner of torch.distributed.checkpoint. If several ranks
hold a chunk, the one with the least to write so far writes it. Rank 0 writes tensors that are no DTensors, as for a
part without DTensors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tr_ckpt import files, names, parts, shard_index, tensor_file, untrusted
from tr_ckpt.errors import CheckpointError
from tr_ckpt.files import FileRecord, Unsynced
from tr_ckpt.parts import CapturedPart, HostBuffers
from tr_ckpt.shard_index import Chunk, Index, SavedTensor
from tr_ckpt.tensor_file import is_distributed

# Dtype and global shape of a tensor, and whether it is a DTensor.
TensorEntry = tuple[torch.dtype, tuple[int, ...], bool]


@dataclass(frozen=True)
class Share:
    """What one rank holds of a part, in a form that can be sent to the other ranks.

    Attributes:
        tensors: the entry of every tensor in the state, by name.
        plan: torch's, of this rank's chunks.
    """

    tensors: dict[str, TensorEntry]
    plan: Any

    @property
    def held(self) -> set[str]:
        """Names of the tensors of which this rank holds at least one number."""
        return {item.index.fqn for item in self.plan.items}

    def distributed(self) -> dict[str, TensorEntry]:
        """Return the entries of the DTensors; other tensors are rank 0's, whatever the other ranks hold."""
        return {name: entry for name, entry in self.tensors.items() if entry[2]}


@dataclass(frozen=True)
class Assignment:
    """What one rank writes.

    Attributes:
        local: this rank's chunks by the names of their tensors; not copied.
        index: the file of each chunk of each tensor, over all ranks.
    """

    local: dict[str, torch.Tensor]
    index: Index


def share(part: str, tensors: Mapping[str, torch.Tensor], rank: int) -> Share | None:
    """Return what this rank holds of a part's tensors; None if none is a DTensor. Not collective.

    Raises:
        CheckpointError: a DTensor's layout cannot be saved.
    """
    if not any(is_distributed(tensor) for tensor in tensors.values()):
        return None
    from torch.distributed.checkpoint.planner import SavePlan

    planner = _planner(tensors, rank)
    plan = planner.create_local_plan()
    items = []
    for item in plan.items:
        size = tuple(item.tensor_data.chunk.sizes)
        local = planner.resolve_data(item)
        if size != tuple(local.shape):
            raise CheckpointError(
                f"{part}: the shard of {item.index.fqn!r} has the shape {list(local.shape)} where its placements say "
                f"{list(size)}; give shape= and stride= to DTensor.from_local when shards are uneven"
            )
        if math.prod(size):  # with few rows, the last ranks hold none
            items.append(item)
    described = {
        name: (tensor.dtype, tuple(tensor.shape), is_distributed(tensor)) for name, tensor in sorted(tensors.items())
    }
    return Share(described, SavePlan(items))


def assign(part: str, tensors: Mapping[str, torch.Tensor], rank: int, shares: Sequence[Share | None]) -> Assignment:
    """Return what this rank writes, given the shares of all ranks in rank order.

    Raises:
        CheckpointError: the ranks do not hold the same tensors, or their chunks do not fill whole ones.
    """
    entries = agreed(part, shares)
    planner = _planner(tensors, rank)
    try:
        plans, _ = planner.create_global_plan([given.plan for given in shares if given is not None])
    except ValueError as error:
        raise CheckpointError(
            f"{part}: the shards of the ranks do not make up whole tensors, each number once: {error}"
        ) from error
    chunks: dict[str, list[Chunk]] = {name: [] for name in entries}
    for writer, plan in enumerate(plans):
        for item in plan.items:
            chunk = item.tensor_data.chunk
            chunks[item.index.fqn].append(
                Chunk(names.shard_name(part, writer), tuple(chunk.offsets), tuple(chunk.sizes))
            )
    index = {
        name: SavedTensor(dtype, shape, distributed, tuple(chunks[name]))
        for name, (dtype, shape, distributed) in entries.items()
    }
    return Assignment({item.index.fqn: planner.resolve_data(item) for item in plans[rank].items}, index)


def _planner(tensors: Mapping[str, torch.Tensor], rank: int) -> Any:
    from torch.distributed.checkpoint import DefaultSavePlanner

    mine = {name: tensor for name, tensor in tensors.items() if rank == 0 or is_distributed(tensor)}
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(mine, is_coordinator=rank == 0)
    return planner


def agreed(part: str, shares: Sequence[Share | None]) -> dict[str, TensorEntry]:
    """Return the entries of a part's tensors, which must be the same on all ranks.

    Raises:
        CheckpointError: they differ.
    """
    first = shares[0]
    for rank, other in enumerate(shares):
        if first is None or other is None:
            without = [str(number) for number, given in enumerate(shares) if given is None]
            raise CheckpointError(
                f"{part} holds DTensors, but none on rank {', '.join(without)}; all ranks must hold the same state"
            )
        ours, theirs = first.distributed(), other.distributed()
        # A rank with an empty shard cannot know that two names share one tensor, as tied weights do.
        theirs = {name: entry for name, entry in theirs.items() if name in ours or name in other.held}
        if ours != theirs:
            name = next(name for name in sorted({*ours, *theirs}) if ours.get(name) != theirs.get(name))
            raise CheckpointError(
                f"{part}: {name!r} is {_describe(ours.get(name))} on rank 0 and {_describe(theirs.get(name))} on rank "
                f"{rank}; all ranks must hold the same DTensors (stages of a pipeline are not supported)"
            )
    assert first is not None
    return first.tensors


def _describe(entry: TensorEntry | None) -> str:
    return "absent" if entry is None else f"{list(entry[1])} of {entry[0]}"


@dataclass(frozen=True)
class CapturedShards:
    """What one rank writes of a part.

    Attributes:
        part: its name.
        rank: number of this process.
        tensors: this rank's chunks, by the names of their tensors.
        text: the JSON of the state; on rank 0 only.
        index: the index of all ranks' chunks, as it is written; on rank 0 only.
    """

    part: str
    rank: int
    tensors: Mapping[str, torch.Tensor]
    text: bytes | None = None
    index: bytes | None = None

    def write(self, folder: Path, unsynced: Unsynced | None = None) -> dict[str, FileRecord]:
        """Write `NAME-shard-RANK.safetensors`, and on rank 0 `NAME.json` and `NAME.shards.json`.

        Raises:
            OSError: a file exists or cannot be written.
        """
        written = {}
        if self.tensors:
            file = names.shard_name(self.part, self.rank)
            written[file] = tensor_file.write(folder / file, self.tensors, unsynced)
        if self.text is not None and self.index is not None:
            file = names.index_name(self.part)
            written[file] = files.write_file(folder / file, [self.index], unsynced=unsynced)
            file = f"{self.part}.json"
            written[file] = files.write_file(folder / file, [self.text, b"\n"], unsynced=unsynced)
        return written


class TakenState:
    """The state of a part that holds DTensors, before the ranks know which of them writes what.

    Its tensors are not copied: capture them before they change.

    Args:
        part: its name.
        rank: number of this process.
        state: the result of the part's `state_dict`.

    Attributes:
        share: what this rank holds, for the other ranks.

    Raises:
        CheckpointError: the state holds a value that cannot be saved.
    """

    def __init__(self, part: str, rank: int, state: Any) -> None:
        self._part = part
        self._rank = rank
        self._text, self._tensors = parts.encode(part, state)
        self.share = share(part, self._tensors, rank)

    def capture(self, shares: Sequence[Any], buffers: HostBuffers | None) -> CapturedPart:
        """Capture what this rank writes. Not collective.

        Args:
            shares: those of all ranks, in rank order.
            buffers: as for `parts.capture`.

        Raises:
            CheckpointError: the ranks do not hold the same tensors, or their shards do not fill whole ones, or they
                are so many that no restore would read their index.
        """
        assigned = assign(self._part, self._tensors, self._rank, shares)
        tensors = assigned.local if buffers is None else buffers.copy(assigned.local)
        if self._rank != 0:
            return CapturedShards(self._part, self._rank, tensors)
        return CapturedShards(self._part, self._rank, tensors, self._text, _text_of(self._part, assigned.index))


def _text_of(part: str, index: Index) -> bytes:
    text = shard_index.dump(index)
    if len(text) > untrusted.MOST_JSON_BYTES:
        raise CheckpointError(
            f"where the {len(index):,} tensors of {part} are takes {len(text):,} bytes of JSON, and at most "
            f"{untrusted.MOST_JSON_BYTES:,} are read back; give shorter names, or lengths that the ranks share equally"
        )
    return text
