"""Decide which files this rank writes for a save, given the state of a part.

A part is written whole by rank 0, or by each rank if each has a state of its own. If its state holds DTensors, every
rank writes its own shards, and nothing is gathered: each rank lists what it holds (`Share`), the ranks exchange these
lists, and from the same lists every rank computes the same plan, with the planner of torch.distributed.checkpoint. If
several ranks hold a chunk, the one with the least to write so far writes it. Plain tensors are rank 0's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from tr_ckpt import codec, files, names, shard_index, tensor_file, untrusted
from tr_ckpt.errors import CheckpointError
from tr_ckpt.files import FileRecord, Unsynced
from tr_ckpt.host_buffers import HostBuffers
from tr_ckpt.ranks import Ranks
from tr_ckpt.shard_index import Chunk, Index, SavedTensor
from tr_ckpt.tensor_file import find_distributed, is_distributed, may_exist

# Dtype and global shape of a tensor, and whether it is a DTensor.
TensorEntry = tuple[torch.dtype, tuple[int, ...], bool]


@dataclass(frozen=True)
class FileToWrite:
    """A file that this rank writes.

    Attributes:
        part: the part that it belongs to.
        name: its name.
        content: its text, or tensors by name, which are not copied.
    """

    part: str
    name: str
    content: bytes | Mapping[str, torch.Tensor]

    def copied(self, buffers: HostBuffers) -> FileToWrite:
        """Return it with copies of its tensors, valid after `buffers.finish()`, so that they may change."""
        return self if isinstance(self.content, bytes) else replace(self, content=buffers.copy(self.content))

    def write(self, folder: Path, unsynced: Unsynced | None = None) -> FileRecord:
        """Write it into `folder`; may run in another thread.

        It is on the disk on return, unless `unsynced` syncs it.

        Raises:
            OSError: it exists or cannot be written.
        """
        if isinstance(self.content, bytes):
            return files.write_file(folder / self.name, [self.content], unsynced=unsynced)
        return tensor_file.write(folder / self.name, self.content, unsynced)


@dataclass(frozen=True)
class Share:
    """What one rank holds of a part with DTensors, in a form that can be sent to the other ranks.

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
class Held:
    """A state that this rank holds.

    Attributes:
        text: its JSON.
        tensors: by their names in the JSON; not copied.
        share: for the other ranks; None if no tensor is a DTensor.
    """

    text: bytes
    tensors: Mapping[str, torch.Tensor]
    share: Share | None = None


def hold(part: str, state: Any, ranks: Ranks) -> Held | None:
    """Encode the state of a part, of which this rank may write something; None if it writes nothing.

    Raises:
        CheckpointError: the state holds a value that cannot be saved.
    """
    is_sharded = may_exist() and next(find_distributed(state), None) is not None
    if is_sharded and part in names.PER_RANK:
        raise CheckpointError(
            f"{part} holds DTensors, and each rank saves a state of its own there; give plain tensors"
        )
    if is_sharded and ranks.is_one_of_several:
        raise CheckpointError(
            f"{part} is held in shards, of which no machine has all; save to a file system that every machine "
            "sees, without save_on_each_node"
        )
    if ranks.rank != 0 and not is_sharded and part not in names.PER_RANK:
        return None
    text, tensors = codec.encode(part, state)
    return Held(text, tensors, _share(part, tensors, ranks.rank) if is_sharded else None)


def files_of(part: str, held: Held | None, shares: Sequence[Share | None], ranks: Ranks) -> list[FileToWrite]:
    """Return the files of a part that this rank writes, given the shares of all ranks in rank order. Not collective.

    Raises:
        CheckpointError: the ranks do not hold the same tensors, or their chunks do not fill whole ones, or they are so
            many that no restore would read their index.
    """
    if not any(shares):
        return [] if held is None else whole(part, ranks.number, held)
    entries = agreed(part, shares)
    assert held is not None  # all ranks hold some
    tensors, index = _assigned(part, held.tensors, ranks.rank, shares, entries)
    found = [FileToWrite(part, names.shard_name(part, ranks.rank), tensors)] if tensors else []
    if ranks.rank == 0:
        found.append(FileToWrite(part, names.index_name(part), _text_of(part, index)))
        found.append(FileToWrite(part, f"{part}.json", held.text + b"\n"))
    return found


def whole(part: str, rank: int, held: Held) -> list[FileToWrite]:
    """Return the files of a part that one rank writes alone: `NAME.json`, and `NAME.safetensors` if it has tensors."""
    stem = names.stem(part, rank)
    found = [FileToWrite(part, f"{stem}.safetensors", held.tensors)] if held.tensors else []
    return [*found, FileToWrite(part, f"{stem}.json", held.text + b"\n")]


def _share(part: str, tensors: Mapping[str, torch.Tensor], rank: int) -> Share:
    """Return what this rank holds of a part's tensors, some of them DTensors.

    Raises:
        CheckpointError: a DTensor's layout cannot be saved.
    """
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


def _assigned(
    part: str,
    tensors: Mapping[str, torch.Tensor],
    rank: int,
    shares: Sequence[Share | None],
    entries: Mapping[str, TensorEntry],
) -> tuple[dict[str, torch.Tensor], Index]:
    """Return the chunks that this rank writes, by tensor, and the file of each chunk of each tensor, over all ranks.

    Raises:
        CheckpointError: the chunks do not fill whole tensors.
    """
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
    return {item.index.fqn: planner.resolve_data(item) for item in plans[rank].items}, index


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


def _text_of(part: str, index: Index) -> bytes:
    text = shard_index.dump(index)
    if len(text) > untrusted.MOST_JSON_BYTES:
        raise CheckpointError(
            f"where the {len(index):,} tensors of {part} are takes {len(text):,} bytes of JSON, and at most "
            f"{untrusted.MOST_JSON_BYTES:,} are read back; give shorter names, or lengths that the ranks share equally"
        )
    return text
