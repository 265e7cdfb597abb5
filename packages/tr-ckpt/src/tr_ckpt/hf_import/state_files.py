"""Read the files that `torch.save` writes, and a model's weights as transformers and PEFT save them.

A file of `torch.save` is a zip archive of a pickle and of the tensors' bytes. Weights are read from safetensors or
from such files.
"""

from __future__ import annotations

import pickle
import warnings
import zipfile
from pathlib import Path
from typing import IO, Any, cast

import torch

from tr_ckpt import reads, tensor_file, untrusted
from tr_ckpt.errors import CheckpointError, DamagedCheckpointError, UnreadableError
from tr_ckpt.hf_import.plain_state import PlainState


def read_archive(path: Path) -> Any:
    """Return the state in a file of `torch.save`, its tensors in host memory; tensors that shared memory still do.

    Nothing that the file names is executed (`torch.load(weights_only=True)`). Every byte is compared with the archive's
    checksums.

    Raises:
        CheckpointError: the file holds something that is not plain state; the message names it.
        DamagedCheckpointError: the file is cut off, was changed, or is not such an archive.
        UnreadableError: it cannot be read.
    """
    name = path.name
    untrusted.require_regular_file(path)
    size_bytes = reads.status(path).st_size
    try:
        with reads.CheckpointFile(path) as opened, torch.serialization.safe_globals(_numpy_globals()):
            file = cast("IO[bytes]", opened)
            with zipfile.ZipFile(file) as archive:
                _check_archive(archive, size_bytes)
            file.seek(0)
            refused = torch.serialization.get_unsafe_globals_in_checkpoint(file)
            if refused:
                raise _NotPlainError(", ".join(sorted(refused)))
            file.seek(0)
            with warnings.catch_warnings(action="ignore"):  # of an unusual protocol: it is read, or refused
                state = torch.load(file, map_location="cpu", weights_only=True)
            return PlainState(size_bytes).take(state)
    except _NotPlainError as error:
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
            f"{name} is not a whole archive of torch.save: {error}. One that was written before torch 1.6 must be "
            "loaded and saved again with a later one"
        ) from error
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{name} cannot be read as plain state: {error}. What torch.save writes by itself is read, without another "
            "pickle_protocol"
        ) from error
    except Exception as error:  # any error of the reader means that the bytes are wrong
        raise DamagedCheckpointError(f"{name} cannot be read: {type(error).__name__}: {error}") from error


class _NotPlainError(CheckpointError):
    """A file names what plain state has not; the message is the names."""


_IS_FOLDER = 0x10  # among the attributes that DOS gave files


def _check_archive(archive: zipfile.ZipFile, size_bytes: int) -> None:
    """Raise unless an archive is one of `torch.save`, in whole."""
    names = archive.namelist()
    if problem := untrusted.paths_problem(names):
        raise DamagedCheckpointError(f"it has {problem}")
    pickles = [name for name in names if name.endswith("/data.pkl") and name.count("/") == 1]
    if len(pickles) != 1 or len(set(names)) != len(names):
        raise DamagedCheckpointError("it is a zip archive, but not one of torch.save")
    entries = archive.infolist()
    for entry in entries:
        if entry.compress_type != zipfile.ZIP_STORED or entry.file_size != entry.compress_size:
            raise DamagedCheckpointError(f"{entry.filename} in it is compressed, which torch.save never does")
        if entry.is_dir() or entry.external_attr & _IS_FOLDER:  # of which torch reads nothing
            raise DamagedCheckpointError(f"{entry.filename} in it is marked as a folder")
    if sum(entry.file_size for entry in entries) > size_bytes:
        raise DamagedCheckpointError("its entries are longer than it is: they lie over each other, or are cut off")
    order = pickles[0].removesuffix("data.pkl") + "byteorder"
    if order in names and archive.read(order) != b"little":
        raise CheckpointError(f"its numbers are stored {archive.read(order)!r}-endian; little-endian ones are read")
    if (changed := archive.testzip()) is not None:
        raise DamagedCheckpointError(f"{changed} in it was changed: its checksum differs")


def _numpy_globals() -> list[Any]:
    """Return what the arrays and scalars of NumPy name in a pickle, of either version of NumPy; nothing without it."""
    try:
        import numpy as np
    except ImportError:
        return []
    own = np.zeros(1).__reduce__()[0]
    scalar = np.float64(0).__reduce__()[0]
    functions = [(own, "_reconstruct"), (scalar, "scalar")]
    named = [
        (function, f"numpy.{core}.multiarray.{name}") for function, name in functions for core in ("core", "_core")
    ]
    return [*named, np.ndarray, np.dtype, *{type(np.dtype(kind)) for kind in "?bhilqBHILQefd"}]


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
            raise DamagedCheckpointError(f"{path.name} names {file!r}, which is not a file of weights beside it")
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
        raise CheckpointError(f"{path.name} holds more than tensors by name; it is not a file of weights")
    return dict(weights)
