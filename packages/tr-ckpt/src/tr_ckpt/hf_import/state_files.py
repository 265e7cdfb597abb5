"""Read the files that `torch.save` writes, and a model's weights as transformers and PEFT save them.

A file of `torch.save` is a zip archive of a pickle and of the tensors' bytes. Weights are read from safetensors or
from such files.
"""

from __future__ import annotations

import ctypes
import math
import zipfile
from pathlib import Path
from typing import Any

import torch

from tr_ckpt import files, reads, tensor_file, untrusted
from tr_ckpt.errors import CheckpointError, DamagedCheckpointError, UnreadableError
from tr_ckpt.hf_import import unpickling
from tr_ckpt.hf_import.unpickling import MOST_BYTES, TIMES_THE_FILE, Strided


def read_archive(path: Path) -> Any:
    """Return the state in a file of `torch.save`, its tensors in host memory; tensors that shared memory still do.

    Nothing that the file names is executed. Every byte is compared with the archive's checksums.

    Raises:
        CheckpointError: the file holds something that is not plain state; the message names it.
        DamagedCheckpointError: the file is cut off, was changed, or is not such an archive.
        UnreadableError: it cannot be read.
    """
    name = path.name
    untrusted.require_regular_file(path)
    try:
        with reads.CheckpointFile(path) as file, zipfile.ZipFile(file) as archive:
            return _Archive(archive, reads.status(path).st_size).load()
    except unpickling.RefusedNameError as error:
        raise CheckpointError(
            f"{name} names {error}, which is neither tensor, number nor container: nothing of it was executed, and it "
            "is not read. Save the state as plain values, or find out who put that there"
        ) from error
    except UnreadableError:
        raise
    except CheckpointError as error:
        raise type(error)(f"{name} cannot be read: {error}") from error
    except zipfile.BadZipFile as error:
        raise DamagedCheckpointError(
            f"{name} is no whole archive of torch.save: {error}. One that was written before torch 1.6 must be loaded "
            "and saved again with a later one"
        ) from error
    except (OSError, EOFError, ValueError, RuntimeError, NotImplementedError, MemoryError) as error:
        raise DamagedCheckpointError(f"{name} cannot be read: {error}") from error


class _Archive:
    """An open archive, and the storages that were read from it."""

    def __init__(self, archive: zipfile.ZipFile, size_bytes: int) -> None:
        self._archive = archive
        self._size_bytes = size_bytes
        self._made_bytes = 0
        self._storages: dict[str, torch.Tensor] = {}
        names = archive.namelist()
        if problem := untrusted.paths_problem(names):
            raise DamagedCheckpointError(f"it has {problem}")
        pickles = [name for name in names if name.endswith("/data.pkl") and name.count("/") == 1]
        if len(pickles) != 1 or len(set(names)) != len(names):
            raise DamagedCheckpointError("it is a zip archive, but not one of torch.save")
        self._pickle = pickles[0]
        self._prefix = self._pickle.removesuffix("data.pkl")

    def load(self) -> Any:
        """Return the state.

        Raises:
            CheckpointError: it is not plain state.
            DamagedCheckpointError: it is not in torch's format.
        """
        if self._prefix + "byteorder" in self._archive.namelist():
            order = self._archive.read(self._prefix + "byteorder")
            if order != b"little":
                raise CheckpointError(f"its numbers are stored {order!r}-endian; little-endian ones are read")
        self._check_sizes()
        return unpickling.load(self._archive.read(self._pickle), self._tensor)

    def _check_sizes(self) -> None:
        entries = self._archive.infolist()
        for entry in entries:
            if entry.compress_type != zipfile.ZIP_STORED or entry.file_size != entry.compress_size:
                raise DamagedCheckpointError(f"{entry.filename} in it is compressed, which torch.save never does")
        if sum(entry.file_size for entry in entries) > self._size_bytes:
            raise DamagedCheckpointError("its entries are longer than it is: they lie over each other, or are cut off")

    def _tensor(self, described: Strided) -> torch.Tensor:
        width = described.dtype.itemsize
        # Overlapping and repeating tensors become full tensors when they are copied.
        self._made_bytes += math.prod(described.size) * width
        if self._made_bytes > max(MOST_BYTES, TIMES_THE_FILE * self._size_bytes):
            raise CheckpointError(
                f"its tensors come to more than {TIMES_THE_FILE} times its {self._size_bytes:,} bytes: they repeat the "
                "same numbers. Save what is not repeated, as tensor.clone() of it"
            )
        numbers = self._storage(described.storage.key)
        available = numbers.numel() // width
        last = described.offset + sum((n - 1) * step for n, step in zip(described.size, described.stride, strict=True))
        if 0 not in described.size and last >= available:
            raise DamagedCheckpointError(
                f"a tensor of shape {described.size} reaches beyond its {available} numbers of {described.dtype}"
            )
        typed = numbers[: available * width].view(described.dtype)
        return typed.as_strided(described.size, described.stride, described.offset)

    def _storage(self, key: str) -> torch.Tensor:
        if key not in self._storages:
            try:
                entry = self._archive.getinfo(f"{self._prefix}data/{key}")
            except KeyError:
                raise DamagedCheckpointError(f"the numbers {key!r} of a tensor are not in it") from None
            self._storages[key] = self._bytes(entry)
        return self._storages[key]

    def _bytes(self, entry: zipfile.ZipInfo) -> torch.Tensor:
        # Allocated by torch for its alignment, and filled in blocks, so that there are never two copies.
        held = torch.empty(entry.file_size, dtype=torch.uint8)
        if not entry.file_size:
            return held
        view = memoryview((ctypes.c_char * entry.file_size).from_address(held.data_ptr())).cast("B")
        start = 0
        with self._archive.open(entry) as file:
            while piece := file.read(files.BLOCK_BYTES):
                view[start : start + len(piece)] = piece
                start += len(piece)
        if start != entry.file_size:
            raise DamagedCheckpointError(f"{entry.filename} in it is cut off")
        return held


# In the order in which transformers looks for them, safetensors first.
SINGLE = ("model.safetensors", "pytorch_model.bin")
INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
ADAPTERS = ("adapter_model.safetensors", "adapter_model.bin")


def find_weights(folder: Path) -> str | None:
    """Return the name of the file with a model's or an adapter's weights, or of their index; None if there is none."""
    return next((name for name in (*SINGLE, *INDEXES, *ADAPTERS) if reads.is_file(folder / name)), None)


def weights_part(folder: Path) -> str:
    """Return the part of the weights: `adapter_model` for a folder that holds a PEFT adapter alone."""
    return "adapter_model" if find_weights(folder) in ADAPTERS else "model"


def read_weights(folder: Path) -> dict[str, torch.Tensor]:
    """Return a model's weights, or an adapter's, by their names in the file; tied ones may appear only once.

    Raises:
        CheckpointError: there are none, or a file holds anything but tensors.
        DamagedCheckpointError: a file does not exist or is damaged.
    """
    name = find_weights(folder)
    if name is None:
        raise CheckpointError(f"there are no weights in it: none of {', '.join((*SINGLE, *INDEXES, *ADAPTERS))}")
    return _sharded(folder, name) if name in INDEXES else _tensors(folder / name)


def _sharded(folder: Path, index: str) -> dict[str, torch.Tensor]:
    placed = weight_map(folder / index)
    weights: dict[str, torch.Tensor] = {}
    for file in sorted(set(placed.values())):
        if not reads.is_file(folder / file):
            raise DamagedCheckpointError(f"{file} is missing, which {index} names")
        weights |= _tensors(folder / file)
    if lost := [name for name in placed if name not in weights]:
        raise DamagedCheckpointError(f"{placed[lost[0]]} lacks {lost[0]!r}, which {index} says is in it")
    return weights


def weight_map(path: Path) -> dict[str, str]:
    """Read the index of weights in several files; returns the file of each weight.

    Raises:
        DamagedCheckpointError: it is not valid, or names what cannot be a file of weights beside it.
    """
    untrusted.require_regular_file(path)
    try:
        placed = untrusted.read_json(path)["weight_map"]
        files = set(placed.values())
    except UnreadableError:
        raise
    except (OSError, CheckpointError, KeyError, TypeError, AttributeError) as error:
        raise DamagedCheckpointError(f"{path.name} cannot be read: {error!r}") from error
    if problem := untrusted.paths_problem(files):
        raise DamagedCheckpointError(f"{path.name} names {problem}")
    for file in files:
        if "/" in file or Path(file).suffix not in (".safetensors", ".bin"):
            raise DamagedCheckpointError(f"{path.name} names {file!r}, which is no file of weights beside it")
    return placed


def _tensors(path: Path) -> dict[str, torch.Tensor]:
    if path.suffix == ".safetensors":
        try:
            return tensor_file.read(path)
        except (DamagedCheckpointError, UnreadableError):
            raise
        except CheckpointError as error:
            raise DamagedCheckpointError(str(error)) from error
    weights: Any = read_archive(path)
    if not isinstance(weights, dict) or not all(
        isinstance(name, str) and isinstance(value, torch.Tensor) for name, value in weights.items()
    ):
        raise CheckpointError(f"{path.name} holds more than tensors by name; it is no file of weights")
    return dict(weights)
