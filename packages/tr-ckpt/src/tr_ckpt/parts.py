"""Capture and write one part of a checkpoint: `NAME.json`, and `NAME.safetensors` if it holds tensors.

A part on its way to the disk, or back:

| object | where | is |
|---|---|---|
| `Stateful` | `checkpointer.py` | the part: it gives its state and takes one |
| `TakenStates` | `saving.py` | the states of all parts of one save, not copied; it knows which of them hold DTensors |
| `CapturedPart` | here | what one rank writes of a part, at one instant; one of the next two |
| `CapturedState` | here | a plain state: JSON, and tensors that are copies if the save is in the background |
| `CapturedShards` | `sharded/capturing.py` | this rank's chunks of a state with DTensors |

`capture` copies tensors into host memory that `HostBuffers` reuses from save to save. Training can then continue
while they are written.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from tr_ckpt import codec, files, names, tensor_file, untrusted
from tr_ckpt.errors import CheckpointError
from tr_ckpt.files import FileRecord, Unsynced
from tr_ckpt.manifest import Manifest
from tr_ckpt.names import MANIFEST
from tr_ckpt.tensor_file import is_distributed

_Kind = tuple[torch.dtype, int, bool]


class HostBuffers:
    """Host memory for one copy of a state: allocated at the first save, reused by later ones.

    New memory costs several times as much as the copy into it, because the system maps it page by page. A buffer fits
    tensors of its dtype and size. Buffers that a save did not use are freed, so that at most one copy is held. Only
    the training thread calls the methods; any thread may read what they return.

    Attributes:
        allocations: how many buffers were ever allocated.
        copied_bytes: how many bytes were ever copied.
    """

    def __init__(self) -> None:
        self.allocations = 0
        self.copied_bytes = 0
        self._free: dict[_Kind, list[torch.Tensor]] = {}
        self._used: list[tuple[_Kind, torch.Tensor]] = []
        self._devices: set[torch.device] = set()

    @property
    def held_bytes(self) -> int:
        """How much memory is held, in use or not."""
        buffers = [buffer for _, buffer in self._used] + [buffer for kept in self._free.values() for buffer in kept]
        return sum(buffer.nbytes for buffer in buffers)

    def begin(self) -> None:
        """Begin a copy of a state: the buffers of the previous copy may be overwritten from here on."""
        while self._used:
            kind, buffer = self._used.pop()
            self._free.setdefault(kind, []).append(buffer)

    def copy(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return copies on the host, dense and of the same dtypes and shapes; they are valid after `finish`."""
        copies = {}
        # A buffer made in inference mode could not be written to outside it.
        with torch.inference_mode(False), torch.no_grad():
            for name, tensor in tensors.items():
                pinned = tensor.device.type == "cuda"
                copy = self._take((tensor.dtype, tensor.numel(), pinned)).view(tensor.shape)
                # The copy into pinned memory is asynchronous, ordered with the kernels of the current stream.
                copies[name] = copy.copy_(tensor.detach(), non_blocking=pinned)
                self.copied_bytes += copy.nbytes
                if pinned:
                    self._devices.add(tensor.device)
        return copies

    def finish(self) -> None:
        """Wait until all copies are made, and free the buffers that this copy did not use."""
        for device in self._devices:
            torch.cuda.current_stream(device).synchronize()  # sync: once a save and device, for all its copies
        self._devices.clear()
        self._free.clear()

    def _take(self, kind: _Kind) -> torch.Tensor:
        kept = self._free.get(kind)
        if kept:
            buffer = kept.pop()
        else:
            dtype, size, pinned = kind
            buffer = torch.empty(size, dtype=dtype, device="cpu", pin_memory=pinned)
            self.allocations += 1
        self._used.append((kind, buffer))
        return buffer


# Parts that differ between the ranks: each rank has its own files.
PER_RANK = ("rng",)

MOST_RANKS = 10**7  # of any run; limits the length of the names of files

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


def check_names(names: Iterable[str]) -> None:
    """Refuse names that cannot be used as file names.

    Raises:
        CheckpointError: a name has other characters, is taken, or differs from another in case alone.
    """
    seen: dict[str, str] = {Path(MANIFEST).stem: Path(MANIFEST).stem}
    for name in names:
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise CheckpointError(
                f"the name {name!r} cannot name a file; use letters, digits, '_', '-' and, not first, '.'"
            )
        if problem := untrusted.path_problem(name) or untrusted.path_problem(f"{name}-shard-{MOST_RANKS}.safetensors"):
            raise CheckpointError(f"the part name {name!r} {problem}; give another")
        if any(re.fullmatch(rf"{per_rank}-\d+", name) for per_rank in PER_RANK) or re.search(r"-shard-\d+$", name):
            raise CheckpointError(f"the part name {name!r} is that of one rank's files; give another")
        if name.endswith(".shards"):
            raise CheckpointError(f"the part name {name!r} is that of the index of a part in shards; give another")
        if (other := seen.setdefault(name.lower(), name)) != name or name == Path(MANIFEST).stem:
            raise CheckpointError(f"the part name {name!r} is taken by {other!r}; some file systems ignore case")


def check_free(taken: Iterable[str], part_names: Iterable[str]) -> None:
    """Refuse files of the caller whose names are not restorable, or belong to a part.

    Raises:
        CheckpointError: the message names the file and the part.
    """
    taken = list(taken)
    if problem := untrusted.paths_problem(taken):
        raise CheckpointError(f"write_extra made {problem}; give it another name, for nobody could restore it")
    part_names = list(part_names)
    for file in taken:
        if (owner := _owner(file, part_names)) is not None:
            raise CheckpointError(f"write_extra made {file!r}, which is where {owner} goes; give it another name")


def _owner(file: str, part_names: Iterable[str]) -> str | None:
    if file.lower() == MANIFEST.lower():
        return "the manifest"
    for name in part_names:
        of_rank = r"-\d+" if name in PER_RANK else ""
        if re.fullmatch(rf"{re.escape(name)}({of_rank}|\.shards|-shard-\d+)\.(json|safetensors)", file, re.IGNORECASE):
            return f"the part {name!r}"
    return None


def stem(name: str, rank: int) -> str:
    """Return the file name, without suffix, of a part."""
    return f"{name}-{rank}" if name in PER_RANK else name


class CapturedPart(Protocol):
    """This rank's share of a part's state, at one instant."""

    def write(self, folder: Path, unsynced: Unsynced | None = None) -> dict[str, FileRecord]:
        """Write it into `folder` and return the records of its files by name; may run in another thread.

        The files are on the disk on return, unless `unsynced` syncs them.
        """
        ...


@dataclass(frozen=True)
class CapturedState:
    """A plain state: JSON and tensors.

    Attributes:
        stem: name of its files, without suffix.
        text: the JSON.
        tensors: by their names in the JSON.
    """

    stem: str
    text: bytes
    tensors: Mapping[str, torch.Tensor]

    def write(self, folder: Path, unsynced: Unsynced | None = None) -> dict[str, FileRecord]:
        """Write `STEM.json`, and `STEM.safetensors` if there are tensors.

        Raises:
            OSError: a file exists or cannot be written.
        """
        written = {}
        if self.tensors:
            file = f"{self.stem}.safetensors"
            written[file] = tensor_file.write(folder / file, self.tensors, unsynced)
        file = f"{self.stem}.json"
        written[file] = files.write_file(folder / file, [self.text, b"\n"], unsynced=unsynced)
        return written


def capture(name: str, rank: int, state: Any, buffers: HostBuffers | None = None) -> CapturedPart | None:
    """Capture what `rank` writes of a part's state; None if it writes nothing.

    A state of plain JSON values is written with sorted keys; otherwise the order of every dict is kept.

    Args:
        name: of the part.
        rank: number of this process.
        state: the result of the part's `state_dict`.
        buffers: where tensors are copied to, so that they may change before they are written. The copies are valid
            after `buffers.finish()`. None copies nothing: write before any tensor changes.

    Raises:
        CheckpointError: the state holds a value that cannot be saved.
    """
    if rank != 0 and name not in PER_RANK:
        return None
    text, tensors = encode(name, state)
    if any(map(is_distributed, tensors.values())):
        raise CheckpointError(f"{name} holds DTensors that came to be during the save; make them before it")
    return CapturedState(stem(name, rank), text, tensors if buffers is None else buffers.copy(tensors))


def encode(name: str, state: Any) -> tuple[bytes, dict[str, torch.Tensor]]:
    """Return the JSON of a part's state and its tensors, which are not copies.

    Raises:
        CheckpointError: the state holds a value that cannot be saved.
    """
    encoder = codec.Encoder(name)
    try:
        encoded = encoder.encode(state)
        text = codec.to_text(encoded, sort_keys=encoder.plain, is_long=encoder.leaves > codec.LONG)
    except RecursionError:
        raise CheckpointError(f"{name} is nested too deeply to be saved") from None
    if len(text) > untrusted.MOST_JSON_BYTES:  # it is ASCII
        raise CheckpointError(
            f"what of {name} is no tensor takes {len(text):,} bytes of JSON, and at most {untrusted.MOST_JSON_BYTES:,} "
            "are read back; give long lists of numbers as tensors"
        )
    return text.encode(), encoder.tensors


def in_shards(described: Manifest) -> set[str]:
    """Return the parts that were saved in shards."""
    return {part for part, owned in described.parts.items() if names.index_name(part) in owned}


def files_to_verify(described: Manifest, targets: Iterable[str], rank: int, world_size: int) -> list[str]:
    """Return the files that a rank verifies before `targets` are loaded.

    One rank verifies each file of shards, because reading all of them takes long. Rank 0 verifies all other files, and
    each rank those of them that it will load.
    """
    shards = [
        name
        for part, owned in sorted(described.parts.items())
        if part in in_shards(described)
        for name in owned
        if name.startswith(f"{part}-shard-")
    ]
    mine = set(shards[rank::world_size])
    stems = tuple(f"{stem(part, rank)}." for part in targets)
    return [
        name
        for name in described.files
        if name in mine or (name not in shards and (rank == 0 or name.startswith(stems)))
    ]
