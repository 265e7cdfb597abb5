"""Read a model's weights as transformers and PEFT save them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tr_ckpt import path_names, plain_file, reads, strict_json, tensor_file
from tr_ckpt.errors import CheckpointError, DamagedCheckpointError, UnreadableError
from tr_ckpt.foreign import archive

# In the order in which transformers itself looks for them, safetensors first.
SINGLE = ("model.safetensors", "pytorch_model.bin")
INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
ADAPTERS = ("adapter_model.safetensors", "adapter_model.bin")


def find(folder: Path) -> str | None:
    """Return the name of the file with a model's or an adapter's weights, or of their index; None if there is none."""
    return next((name for name in (*SINGLE, *INDEXES, *ADAPTERS) if reads.is_file(folder / name)), None)


def part_of(folder: Path) -> str:
    """Return the part that the weights are: `adapter_model` of a folder that holds an adapter of PEFT alone."""
    return "adapter_model" if find(folder) in ADAPTERS else "model"


def read(folder: Path) -> dict[str, torch.Tensor]:
    """Return a model's weights, or an adapter's, by their names in the file; tied ones may be there once only.

    Raises:
        CheckpointError: there are none, or a file holds anything but tensors.
        DamagedCheckpointError: a file is missing or damaged.
    """
    name = find(folder)
    if name is None:
        raise CheckpointError(f"there are no weights in it: none of {', '.join((*SINGLE, *INDEXES, *ADAPTERS))}")
    return _sharded(folder, name) if name in INDEXES else _tensors(folder / name)


def _sharded(folder: Path, index: str) -> dict[str, torch.Tensor]:
    placed = _weight_map(folder / index)
    weights: dict[str, torch.Tensor] = {}
    for file in sorted(set(placed.values())):
        if not reads.is_file(folder / file):
            raise DamagedCheckpointError(f"{file} is missing, which {index} names")
        weights |= _tensors(folder / file)
    if lost := [name for name in placed if name not in weights]:
        raise DamagedCheckpointError(f"{placed[lost[0]]} lacks {lost[0]!r}, which {index} says is in it")
    return weights


def _weight_map(path: Path) -> dict[str, str]:
    plain_file.require(path)
    try:
        placed = strict_json.read(path)["weight_map"]
        files = set(placed.values())
    except UnreadableError:
        raise
    except (OSError, CheckpointError, KeyError, TypeError, AttributeError) as error:
        raise DamagedCheckpointError(f"{path.name} cannot be read: {error!r}") from error
    if problem := path_names.wrong_among(files):
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
    weights: Any = archive.read(path)
    if not isinstance(weights, dict) or not all(
        isinstance(name, str) and isinstance(value, torch.Tensor) for name, value in weights.items()
    ):
        raise CheckpointError(f"{path.name} holds more than tensors by name; it is no file of weights")
    return dict(weights)
