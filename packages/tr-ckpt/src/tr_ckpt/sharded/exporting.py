"""Export one model from a checkpoint, in the layout that `from_pretrained` loads, a tensor at a time.

The weights can be converted to another floating-point dtype. The exported configuration then names that dtype.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tr_ckpt import discovery, files, processes, reads, staging, tensor_file
from tr_ckpt.discovery import Found
from tr_ckpt.errors import CheckpointError
from tr_ckpt.manifest import Manifest
from tr_ckpt.reader import CheckpointReader
from tr_ckpt.shard_index import Index

INDEX = "model.safetensors.index.json"

# The names of the dtype in a configuration; the second is the older one.
_DTYPE_KEYS = ("dtype", "torch_dtype")


def convert_dtype(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor in another dtype; itself if it has that dtype.

    Raises:
        CheckpointError: a number is too large for `dtype`, and would become infinite.
    """
    converted = tensor.to(dtype)
    if not dtype.is_floating_point or tensor.dtype == dtype:
        return converted
    if bool((converted.isinf() & tensor.isfinite()).any()):
        largest = tensor[tensor.isfinite()].abs().max().item()
        raise CheckpointError(
            f"{name} holds {largest:.4g}, and the largest number of {_name_of(dtype)} is {torch.finfo(dtype).max:.4g}; "
            "give bfloat16, which reaches as far as float32"
        )
    return converted


def config_with_dtype(raw: bytes, dtype: torch.dtype) -> bytes:
    """Return a `config.json` that names `dtype` wherever it names the dtype of the weights; otherwise unchanged.

    A reader that follows the configuration would otherwise convert the weights back.
    """
    try:
        content = json.loads(raw)
    except (ValueError, RecursionError):
        return raw
    changed = _with_dtype(content, _name_of(dtype))
    return raw if changed == content else (json.dumps(changed, indent=2) + "\n").encode()


def _with_dtype(value: Any, name: str) -> Any:
    if not isinstance(value, dict):
        return value
    return {
        key: name if key in _DTYPE_KEYS and _is_float(item) else _with_dtype(item, name) for key, item in value.items()
    }


def _is_float(value: Any) -> bool:
    dtype = vars(torch).get(value) if isinstance(value, str) else None  # not getattr: it imports missing names
    return isinstance(dtype, torch.dtype) and dtype.is_floating_point


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def export(
    checkpoint: str | Path,
    target: str | Path,
    *,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int | None = None,
    part: str = "model",
) -> list[Path]:
    """Write the model of a checkpoint, sharded or not, with the files beside it, to a new folder.

    Needs one process, which holds about two tensors at a time. The exported files are verified first. The folder
    appears whole or not at all.

    Args:
        checkpoint: the folder of one checkpoint.
        target: the folder to make; it may exist if it is empty.
        dtype: the dtype for floating-point tensors; None keeps theirs.
        max_shard_bytes: the largest size of one file of tensors; a single larger tensor gets its own file. None
            writes one file.
        part: name of the model's part.

    Returns:
        The files made, sorted.

    Raises:
        DamagedCheckpointError: a file of the export is damaged.
        CheckpointError: the part does not exist, or an argument does not fit.
        OSError: a file cannot be written.
    """
    source, target = Path(checkpoint).expanduser().absolute(), Path(target).expanduser().absolute()
    if dtype is not None and not (dtype.is_floating_point and dtype in tensor_file.DTYPES):
        raise CheckpointError(f"dtype={dtype} is none that floating-point weights are kept in; give torch.bfloat16")
    if max_shard_bytes is not None and max_shard_bytes < 1:
        raise CheckpointError(f"max_shard_bytes={max_shard_bytes} holds no tensor; give 1 or more, or None")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise CheckpointError(f"{target} exists and is not an empty folder; give another")
    described = _checked(source, part)
    processes.begin_beating()
    for left in staging.cut_short(target.parent, "writing", target.name):
        staging.discard(left)
    folder = processes.temporary(target.parent, "writing", target.name)
    try:
        files.make_folders(target.parent)
        files.fsync_parents(target.parent)
        files.make_folder(folder)
        _copy(source, described.extra_files(), folder, dtype)
        with CheckpointReader(source, described.parts) as reader:
            _write_tensors(reader, part, folder, dtype, max_shard_bytes)
        files.sync_folder(folder)
        if target.exists():
            files.remove_folder(target)
        files.rename(folder, target)
        files.sync_folder(target.parent)
    except BaseException:
        if folder.exists():
            staging.discard(folder)
        raise
    finally:
        processes.release(folder)
    return sorted(path for path in target.rglob("*") if path.is_file())


def _checked(source: Path, part: str) -> Manifest:
    try:
        described = discovery.check_quickly(Found(None, source.name, source))
        if part not in described.parts:
            raise CheckpointError(f"there is no {part!r} in it, only {', '.join(sorted(described.parts))}")
        wanted = [*described.parts[part], *described.extra_files()]
        discovery.raise_if_damaged(discovery.damages(source, described, wanted))
        with CheckpointReader(source, described.parts) as reader:
            if not reader.index(part):
                raise CheckpointError(f"the part {part!r} holds no tensors")
    except CheckpointError as error:
        raise type(error)(f"{source}: {error}") from error
    return described


def _copy(source: Path, extra: list[str], folder: Path, dtype: torch.dtype | None) -> None:
    made = set()
    for name in extra:
        for above in sorted(Path(name).parents)[1:]:  # without the folder itself
            if above not in made:
                files.make_folder(folder / above)
                made.add(above)
        if name == "config.json" and dtype is not None:
            files.write_file(folder / name, [config_with_dtype(reads.content(source / name), dtype)])
            continue
        files.write_file(folder / name, reads.blocks(source / name, files.BLOCK_BYTES))
    for above in sorted(made, reverse=True):
        files.sync_folder(folder / above)


def _write_tensors(
    reader: CheckpointReader, part: str, folder: Path, dtype: torch.dtype | None, max_shard_bytes: int | None
) -> None:
    index = reader.index(part)
    becoming = {
        name: replace(saved, dtype=dtype if dtype is not None and saved.dtype.is_floating_point else saved.dtype)
        for name, saved in index.items()
    }
    shards = list(_shards(becoming, max_shard_bytes))
    placed: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = "model.safetensors" if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        empty = {name: torch.empty(saved.shape, dtype=saved.dtype, device="meta") for name, saved in shard.items()}
        tensor_file.write_each(
            folder / file,
            empty,
            lambda name: convert_dtype(name, reader.tensor(name, index[name]), becoming[name].dtype),
        )
        placed |= dict.fromkeys(shard, file)
    if len(shards) > 1:
        total = sum(saved.size_bytes for saved in becoming.values())
        content = {"metadata": {"total_size": total}, "weight_map": placed}
        files.write_file(folder / INDEX, [json.dumps(content, indent=2, sort_keys=True).encode() + b"\n"])


def _shards(index: Index, max_bytes: int | None) -> Iterator[Index]:
    """Yield the tensors in groups of at most `max_bytes`, in the order of the index."""
    lot: Index = {}
    filled = 0
    for name, saved in index.items():
        size = saved.size_bytes
        if lot and max_bytes is not None and filled + size > max_bytes:
            yield lot
            lot, filled = {}, 0
        lot[name] = saved
        filled += size
    yield lot
