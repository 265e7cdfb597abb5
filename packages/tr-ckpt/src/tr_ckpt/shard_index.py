"""Read and write `NAME.shards.json`: the file of each chunk of each tensor of a part, a line a tensor.

```
{"format": 2, "files": ["model-shard-0.safetensors", "model-shard-1.safetensors"], "tensors": {
"layers.0.weight": {"dtype": "F32", "shape": [8, 4], "distributed": true, "box": [4, 4], "in": [[0, 2, 1]]},
"layers.0.bias": {"dtype": "F32", "shape": [5], "distributed": true, "chunks": [
    {"file": "model-shard-0.safetensors", "offset": [0], "size": [2]},
    {"file": "model-shard-1.safetensors", "offset": [2], "size": [3]}]}
}}
```

Chunks of one size, of which the last in a dimension may be shorter, are a grid: `box` is that size, and `in` has the
files of the chunks in row-major order, as runs of first number, count and step in `files`. So a line is as long for
many ranks as for few. Other chunks are listed, as format 1 lists all of them; `is_filled` checks that they fill the
tensor without a gap and without an overlap. A file holds at most one chunk of a tensor, under the tensor's name.
`dtype` is safetensors' code.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch

from tr_ckpt import reads, untrusted
from tr_ckpt.errors import CheckpointError, UnreadableError
from tr_ckpt.tensor_file import DTYPES, dtype_of

FORMAT = 2

# Format 1 lists the chunks of every tensor.
_READ = (1, FORMAT)

# A chunk takes at least so many bytes of the header of its file.
_LEAST_ENTRY_BYTES = 40

# Offset and length of a box, one number a dimension.
Box = tuple[tuple[int, ...], tuple[int, ...]]

# The most sharded dimensions; a box has two to the power of these corners.
_MOST_SHARDED_DIMENSIONS = 8


@dataclass(frozen=True)
class Chunk:
    """A box of a tensor, not empty.

    Attributes:
        file: the safetensors file that holds it.
        offset: its start in the tensor, one number a dimension.
        size: its length, one number a dimension.
    """

    file: str
    offset: tuple[int, ...]
    size: tuple[int, ...]


@dataclass(frozen=True)
class SavedTensor:
    """A tensor whose numbers are in one or more files.

    Attributes:
        dtype: of its numbers.
        shape: of the whole tensor.
        distributed: whether it was a DTensor when it was saved; None if unknown.
        chunks: boxes that fill it without overlap.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    distributed: bool | None
    chunks: tuple[Chunk, ...]

    @property
    def size_bytes(self) -> int:
        """How many bytes its numbers take."""
        return math.prod(self.shape) * self.dtype.itemsize


Index = dict[str, SavedTensor]


def dump(index: Mapping[str, SavedTensor]) -> bytes:
    """Return the content of the index file."""
    held = {chunk.file for saved in index.values() for chunk in saved.chunks}
    listed = sorted(held, key=lambda file: (len(file), file))  # so that numbers of ranks ascend
    numbers = {file: number for number, file in enumerate(listed)}
    lines = [f"{json.dumps(name)}: {json.dumps(_line(saved, numbers))}" for name, saved in sorted(index.items())]
    head = f'{{"format": {FORMAT}, "files": {json.dumps(listed)}, "tensors": {{'
    return "\n".join([head, ",\n".join(lines), "}}", ""]).encode()


def _line(saved: SavedTensor, numbers: Mapping[str, int]) -> dict[str, Any]:
    line = {"dtype": DTYPES[saved.dtype], "shape": saved.shape, "distributed": saved.distributed}
    chunks = sorted(saved.chunks, key=lambda chunk: chunk.offset)
    if chunks and [(chunk.offset, chunk.size) for chunk in chunks] == list(_grid(saved.shape, chunks[0].size)):
        return {**line, "box": chunks[0].size, "in": _runs([numbers[chunk.file] for chunk in chunks])}
    return {**line, "chunks": [{"file": chunk.file, "offset": chunk.offset, "size": chunk.size} for chunk in chunks]}


def _grid(shape: Sequence[int], box: Sequence[int]) -> Iterator[Box]:
    """Yield the boxes of a tensor that is cut into equal ones, in row-major order; the last ones may be smaller."""
    starts = [range(0, whole, side) for whole, side in zip(shape, box, strict=True)]
    for offset in product(*starts):
        yield offset, tuple(min(side, whole - start) for start, side, whole in zip(offset, box, shape, strict=True))


def _runs(numbers: Sequence[int]) -> list[list[int]]:
    """Return numbers as runs of first, count and step."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs:
            first, count, step = runs[-1]
            if number - first == count * step or (count == 1 and number > first):
                runs[-1] = [first, count + 1, number - first if count == 1 else step]
                continue
        runs.append([number, 1, 1])
    return runs


def read(path: Path, files: Collection[str]) -> Index:
    """Read an index and check that it is consistent.

    Args:
        path: the index file.
        files: the files of the part; a chunk in another file is refused.

    Raises:
        CheckpointError: it is not in the format of `dump`.
        UnreadableError: it cannot be read.
    """
    untrusted.require_regular_file(path)
    try:
        content = untrusted.read_json(path)
        if content["format"] not in _READ:
            raise CheckpointError(f"its format is {content['format']!r:.80}; this version reads up to {FORMAT}")
        listed = content.get("files", [])
        if not isinstance(listed, list) or len(listed) > len(files):
            raise CheckpointError("it lists more files than this part has")
        room, index = _Room(path.parent), {}
        for name, entry in content["tensors"].items():
            index[name] = _tensor(name, entry, files, listed)
            room.take(index[name])
        return index
    except UnreadableError:
        raise
    except (OSError, LookupError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{path.name} cannot be read: {error}") from error


class _Room:
    """How much the files hold in which an index places tensors.

    An index of more than that is refused before memory is taken for it. Its chunks take memory too, and a line may
    stand for many, so each counts.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._held: dict[str, int] = {}
        self._needed: Counter[str] = Counter()

    def take(self, saved: SavedTensor) -> None:
        """Place the chunks of one more tensor.

        Raises:
            CheckpointError: a file does not hold them.
        """
        for chunk in saved.chunks:
            file = chunk.file
            if file not in self._held:
                untrusted.require_regular_file(self._folder / file)
                self._held[file] = reads.status(self._folder / file).st_size
            self._needed[file] += math.prod(chunk.size) * saved.dtype.itemsize + _LEAST_ENTRY_BYTES
            size, held = self._needed[file], self._held[file]
            if size > held:
                raise CheckpointError(f"it places {size:,} bytes in {file}, which has {held:,}")


def _tensor(name: str, entry: dict[str, Any], files: Collection[str], listed: Sequence[str]) -> SavedTensor:
    shape = _numbers(entry["shape"])
    chunks = _cells(name, shape, entry, listed) if "box" in entry else _listed_chunks(name, shape, entry["chunks"])
    for chunk in chunks:
        if chunk.file not in files:
            raise CheckpointError(f"it places a chunk of {name!r} in {chunk.file!r}, which is not a file of this part")
    return SavedTensor(dtype_of(entry["dtype"]), shape, bool(entry["distributed"]), tuple(chunks))


def _cells(name: str, shape: tuple[int, ...], entry: dict[str, Any], listed: Sequence[str]) -> list[Chunk]:
    """Return the chunks of a grid, of which a file has at most one."""
    box, runs = _numbers(entry["box"]), [_numbers(run) for run in entry["in"]]
    fits = len(box) == len(shape) and all(0 < side <= whole for side, whole in zip(box, shape, strict=True))
    count = math.prod(-(-whole // side) for side, whole in zip(box, shape, strict=True)) if fits else -1
    if count != sum(many for _, many, _ in runs) or count > len(listed):
        raise CheckpointError(f"the chunks of {name!r} do not fill its shape {list(shape)}, each number once")
    numbers = [first + step * number for first, many, step in runs for number in range(many)]
    return [
        Chunk(listed[number], offset, size) for number, (offset, size) in zip(numbers, _grid(shape, box), strict=True)
    ]


def _listed_chunks(name: str, shape: tuple[int, ...], given: list[dict[str, Any]]) -> list[Chunk]:
    chunks = [Chunk(chunk["file"], _numbers(chunk["offset"]), _numbers(chunk["size"])) for chunk in given]
    for chunk in chunks:
        inside = len(chunk.offset) == len(chunk.size) == len(shape) and all(
            0 < size <= whole - start for start, size, whole in zip(chunk.offset, chunk.size, shape, strict=True)
        )
        if not inside:
            raise CheckpointError(f"a chunk of {name!r} lies outside its shape {list(shape)}")
    if not is_filled(shape, [(chunk.offset, chunk.size) for chunk in chunks]):
        raise CheckpointError(f"the chunks of {name!r} do not fill its shape {list(shape)}, each number once")
    return chunks


def _numbers(given: Any) -> tuple[int, ...]:
    if not isinstance(given, list) or not all(type(number) is int and 0 <= number < 2**63 for number in given):
        raise CheckpointError(f"{given!r:.80} is not a list of lengths")
    return tuple(given)


def is_filled(shape: Sequence[int], boxes: Sequence[Box]) -> bool:
    """Whether boxes, which lie inside `shape` and are not empty, contain each of its numbers exactly once.

    The time is proportional to the number of boxes. Each corner of a box counts 1 or -1, by how many of
    its sides end there. These counts determine how many boxes contain each number, so they must equal those of `shape`.
    Dimensions in which every box has the full length are left out; at most 8 may be sharded.
    """
    if not math.prod(shape):
        return not boxes
    split = [axis for axis, whole in enumerate(shape) if any(size[axis] != whole for _, size in boxes)]
    if len(split) > _MOST_SHARDED_DIMENSIONS:
        return False
    counts: Counter[tuple[int, ...]] = Counter()
    for offset, size in boxes:
        _count_corners(counts, [(offset[axis], offset[axis] + size[axis]) for axis in split], 1)
    _count_corners(counts, [(0, shape[axis]) for axis in split], -1)
    return not any(counts.values())


def _count_corners(counts: Counter[tuple[int, ...]], sides: Sequence[tuple[int, int]], weight: int) -> None:
    for ends in product((0, 1), repeat=len(sides)):
        corner = tuple(side[end] for side, end in zip(sides, ends, strict=True))
        counts[corner] += weight * (-1) ** sum(ends)
