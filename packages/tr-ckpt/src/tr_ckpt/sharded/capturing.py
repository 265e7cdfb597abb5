"""Save a part whose state holds DTensors: every rank writes its own shards, nothing is gathered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tr_ckpt import distributed_tensor, files, parts, tensor_file
from tr_ckpt.files import FileRecord
from tr_ckpt.host_buffers import HostBuffers
from tr_ckpt.parts import CapturedPart
from tr_ckpt.sharded import planning, shard_index
from tr_ckpt.sharded.shard_index import Index


@dataclass(frozen=True)
class CapturedShards:
    """What one rank writes of a part.

    Attributes:
        part: its name.
        rank: number of this process.
        tensors: this rank's chunks, by the names of their tensors.
        text: the JSON of the state; on rank 0.
        index: where all ranks' chunks are; on rank 0.
    """

    part: str
    rank: int
    tensors: Mapping[str, torch.Tensor]
    text: bytes | None = None
    index: Index | None = None

    def write(self, folder: Path) -> dict[str, FileRecord]:
        """Write `NAME-shard-RANK.safetensors`, and on rank 0 `NAME.json` and `NAME.shards.json`.

        Raises:
            OSError: a file exists or cannot be written.
        """
        written = {}
        if self.tensors:
            file = shard_index.shard_name(self.part, self.rank)
            written[file] = tensor_file.write(folder / file, self.tensors)
        if self.text is not None and self.index is not None:
            file = shard_index.file_name(self.part)
            written[file] = files.write_file(folder / file, [shard_index.dump(self.index)])
            file = f"{self.part}.json"
            written[file] = files.write_file(folder / file, [self.text, b"\n"])
        return written


class TakenState:
    """The state of a part that holds DTensors, before it is known which rank writes what.

    Its tensors are those of training: capture them before they change.

    Args:
        part: its name.
        rank: number of this process.
        state: what the part's `state_dict` returned.

    Attributes:
        share: what this rank holds, for the other ranks.

    Raises:
        CheckpointError: the state holds something that cannot be saved.
    """

    def __init__(self, part: str, rank: int, state: Any) -> None:
        self._part = part
        self._rank = rank
        self._text, self._tensors = parts.encode(part, state)
        self.share = planning.share(part, self._tensors, rank)

    def capture(self, shares: Sequence[Any], buffers: HostBuffers | None) -> CapturedPart:
        """Take what this rank writes; communicates nothing.

        Args:
            shares: those of all ranks, in rank order.
            buffers: as of `parts.capture`.

        Raises:
            CheckpointError: the ranks do not hold the same tensors, or their shards do not make up whole ones.
        """
        assigned = planning.assign(self._part, self._tensors, self._rank, shares)
        tensors = assigned.local if buffers is None else buffers.copy(assigned.local)
        if self._rank != 0:
            return CapturedShards(self._part, self._rank, tensors)
        return CapturedShards(self._part, self._rank, tensors, self._text, assigned.index)


def take(part: str, rank: int, state: Any) -> TakenState | None:
    """Return the taken state of a part if it holds a DTensor, None if not.

    Raises:
        CheckpointError: the state holds something that cannot be saved.
    """
    if not distributed_tensor.may_exist() or next(distributed_tensor.find(state), None) is None:
        return None
    return TakenState(part, rank, state)
