"""Read and write `NAME.shards.json`: the file of each chunk of each tensor of a part.

```
{"format": 1, "tensors": {
    "layers.0.weight": {"dtype": "F32", "shape": [8, 4], "distributed": true, "chunks": [
        {"file": "model-shard-0.safetensors", "offset": [0, 0], "size": [4, 4]},
        {"file": "model-shard-1.safetensors", "offset": [4, 0], "size": [4, 4]}]}}}
```

A file holds at most one chunk of a tensor, under the tensor's name. `dtype` is safetensors' code. `is_filled` checks
that the chunks fill the tensor without a gap and without an overlap.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from tr_ckpt import reads, untrusted
from tr_ckpt.errors import CheckpointError, UnreadableError
from tr_ckpt.tensor_file import DTYPES

# Offset and length of a box, one number a dimension.
Box = tuple[tuple[int, ...], tuple[int, ...]]

# The most sharded dimensions; a box has two to the power of these corners.
_MOST_SHARDED_DIMENSIONS = 8


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


FORMAT = 1

_DTYPE_OF = {code: dtype for dtype, code in DTYPES.items()}


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


Index = dict[str, SavedTensor]


def dump(index: Mapping[str, SavedTensor]) -> bytes:
    """Return the content of the index file."""
    tensors = {
        name: {
            "dtype": DTYPES[saved.dtype],
            "shape": saved.shape,
            "distributed": saved.distributed,
            "chunks": [{"file": chunk.file, "offset": chunk.offset, "size": chunk.size} for chunk in saved.chunks],
        }
        for name, saved in index.items()
    }
    return json.dumps({"format": FORMAT, "tensors": tensors}, indent=1, sort_keys=True).encode() + b"\n"


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
        if content["format"] != FORMAT:
            raise CheckpointError(f"its format is {content['format']!r:.80}; this version reads {FORMAT}")
        index = {name: _tensor(name, entry, files) for name, entry in content["tensors"].items()}
        _check_sizes(path.parent, index)
        return index
    except UnreadableError:
        raise
    except (OSError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{path.name} cannot be read: {error}") from error


def _check_sizes(folder: Path, index: Index) -> None:
    """Refuse an index of more bytes than its files hold, before memory is allocated for it."""
    needed: Counter[str] = Counter()
    for saved in index.values():
        for chunk in saved.chunks:
            needed[chunk.file] += math.prod(chunk.size) * saved.dtype.itemsize
    for file, size in needed.items():
        untrusted.require_regular_file(folder / file)
        held = reads.status(folder / file).st_size
        if size > held:
            raise CheckpointError(f"it places {size:,} bytes in {file}, which has {held:,}")


def of_plain_file(path: Path) -> Index:
    """Return the index of a part that was saved whole, from its safetensors file; empty if it has none.

    Raises:
        CheckpointError: it is not a valid safetensors file.
        UnreadableError: it cannot be read.
    """
    if not reads.is_there(path):
        return {}
    untrusted.require_regular_file(path)
    index: Index = {}
    try:
        with reads.tensors(path) as file:
            for name in file.keys():  # noqa: SIM118
                view = file.get_slice(name)
                shape = tuple(view.get_shape())
                chunks = (Chunk(path.name, (0,) * len(shape), shape),) if math.prod(shape) else ()
                index[name] = SavedTensor(_dtype(view.get_dtype()), shape, None, chunks)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path.name} is no valid safetensors file: {error}") from error
    return index


def _tensor(name: str, entry: dict[str, Any], files: Collection[str]) -> SavedTensor:
    shape = _numbers(entry["shape"])
    chunks = []
    for given in entry["chunks"]:
        chunk = Chunk(given["file"], _numbers(given["offset"]), _numbers(given["size"]))
        if chunk.file not in files:
            raise CheckpointError(f"it places a chunk of {name!r} in {chunk.file!r}, which is no file of this part")
        inside = len(chunk.offset) == len(chunk.size) == len(shape) and all(
            0 < size <= whole - start for start, size, whole in zip(chunk.offset, chunk.size, shape, strict=True)
        )
        if not inside:
            raise CheckpointError(f"a chunk of {name!r} lies outside its shape {list(shape)}")
        chunks.append(chunk)
    if not is_filled(shape, [(chunk.offset, chunk.size) for chunk in chunks]):
        raise CheckpointError(f"the chunks of {name!r} do not fill its shape {list(shape)}, each number once")
    return SavedTensor(_dtype(entry["dtype"]), shape, bool(entry["distributed"]), tuple(chunks))


def _numbers(given: Any) -> tuple[int, ...]:
    if not isinstance(given, list) or not all(type(number) is int and 0 <= number < 2**63 for number in given):
        raise CheckpointError(f"{given!r:.80} is no list of lengths")
    return tuple(given)


def _dtype(code: str) -> torch.dtype:
    if code not in _DTYPE_OF:
        raise CheckpointError(f"torch {torch.__version__} has no dtype {code!r}; a newer one wrote it")
    return _DTYPE_OF[code]
