"""Read the tensors of one part, whole, one at a time, whether it was saved whole or in shards."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from tr_ckpt.sharded import shard_index
from tr_ckpt.sharded.reading import SlicedFiles
from tr_ckpt.sharded.shard_index import Index, SavedTensor


class SavedTensors:
    """The tensors of a part.

    Args:
        index: where they are.
        opened: the files that they are in.
    """

    def __init__(self, index: Index, opened: SlicedFiles) -> None:
        self._index = index
        self._opened = opened

    @property
    def names(self) -> list[str]:
        """Their names, sorted."""
        return sorted(self._index)

    def describe(self, name: str) -> SavedTensor:
        """Return dtype and shape of a tensor, unread."""
        return self._index[name]

    def load(self, name: str) -> torch.Tensor:
        """Return a tensor: one that lies in one piece as a view of its file, else put together in memory.

        Raises:
            CheckpointError: the file that should hold it does not.
        """
        saved = self._index[name]
        if len(saved.chunks) == 1:
            [chunk] = saved.chunks
            return self._opened.slice(name, chunk, (0,) * len(chunk.size), chunk.size)
        whole = torch.empty(saved.shape, dtype=saved.dtype)
        for chunk in saved.chunks:
            box = tuple(slice(at, at + size) for at, size in zip(chunk.offset, chunk.size, strict=True))
            whole[box] = self._opened.slice(name, chunk, (0,) * len(chunk.size), chunk.size)
        return whole

    def size_bytes(self, name: str) -> int:
        """Return how many bytes a tensor has; 0 if there is none of that name."""
        saved = self._index.get(name)
        return 0 if saved is None else math.prod(saved.shape) * saved.dtype.itemsize


@contextmanager
def opened_tensors(folder: Path, stem: str, files: Sequence[str]) -> Iterator[SavedTensors]:
    """Open the tensors whose files' names begin with `stem`.

    Args:
        folder: the checkpoint.
        stem: the part's name, with the rank where each rank has its own.
        files: the part's files.

    Raises:
        CheckpointError: a file is not what a save writes.
    """
    if (name := shard_index.file_name(stem)) in files:
        index = shard_index.read(folder / name, files)
    else:
        index = shard_index.of_plain_file(folder / f"{stem}.safetensors")
    with SlicedFiles(folder) as opened:
        yield SavedTensors(index, opened)
