"""Make the operations of saves and restores fail, and read single files, in the tests of a loop with checkpoints.

The operations and the waits of a process are replaced for good, or until the returned function is called. The readers
take what may be anybody's file; each raises `CheckpointError` and nothing else if the file is not valid.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from tr_ckpt import (
    codec,
    discovery,
    files,
    folder_lock,
    manifest,
    rank_records,
    reader,
    reads,
    shard_index,
    tensor_file,
    untrusted,
)
from tr_ckpt.command import selection
from tr_ckpt.command.comparing import compare_values
from tr_ckpt.errors import CheckpointError, PushError
from tr_ckpt.hf_import import state_files, trainer_files
from tr_ckpt.hub import resume
from tr_ckpt.hub.hub_repository import HubRepository
from tr_ckpt.names import MANIFEST
from tr_ckpt.plan import Held, whole
from tr_ckpt.processes import Process, this_process
from tr_ckpt.reader import CheckpointReader
from tr_ckpt.sharded.exporting import config_with_dtype

__all__ = [
    "CHANGES",
    "READS",
    "Process",
    "check_answers",
    "compare_state",
    "config_with_dtype",
    "give_owners",
    "is_allowed_name",
    "operation",
    "read_archive",
    "read_foreign_state",
    "read_manifest",
    "read_part",
    "read_shard_index",
    "read_tensors",
    "read_weight_map",
    "replace_operations",
    "set_hub_delays",
    "shorten_waits",
    "show_state",
    "this_process",
    "verified",
    "verify",
    "write_part",
]

CHANGES: tuple[str, ...] = files.OPERATIONS  # names of the operations that change the file system
READS: tuple[str, ...] = reads.READS  # names of those that read it


def operation(name: str) -> Callable[..., Any]:
    """Return the operation that a save or restore would call now."""
    return getattr(files if name in CHANGES else reads, name)


def replace_operations(
    replace: Callable[[str, Callable[..., Any]], Callable[..., Any]], names: Iterable[str] = CHANGES
) -> Callable[[], None]:
    """Replace operations of all saves and restores of this process; every later use calls the new ones.

    Args:
        replace: called with the name of each operation and the operation; returns what is called in its place.
        names: of the operations; members of `CHANGES` and `READS`.

    Returns:
        A function that takes the replacement back.
    """
    before = {name: operation(name) for name in names}

    def put(operations: Mapping[str, Callable[..., Any]]) -> None:
        for name, each in operations.items():
            setattr(files if name in CHANGES else reads, name, each)

    put({name: replace(name, original) for name, original in before.items()})
    return lambda: put(before)


def shorten_waits(retry_delays_s: tuple[float, ...], rank_limit_s: float | None = None) -> Callable[[], None]:
    """Set the waits of this process for a disk that cannot be read, and for other ranks.

    Args:
        retry_delays_s: what a read waits before each further try; empty for a single try.
        rank_limit_s: how long a background save waits for a rank that says nothing of its files; None leaves that.

    Returns:
        A function that takes it back.
    """
    before = reads.DELAYS_S, rank_records.LIMIT_S

    def put(delays: tuple[float, ...], limit: float) -> None:
        reads.DELAYS_S, rank_records.LIMIT_S = delays, limit

    put(retry_delays_s, before[1] if rank_limit_s is None else rank_limit_s)
    return lambda: put(*before)


def give_owners(ending_s: float) -> None:
    """Set how long a save of this process waits for a living owner of its folder to end."""
    folder_lock.ENDING_S = ending_s


def set_hub_delays(repository: HubRepository, delays_s: tuple[float, ...]) -> None:
    """Set the waits of a repository before each retry of a failed request."""
    repository._delays_s = delays_s


def verify(folder: Path) -> None:
    """Read every byte of a checkpoint, and compare it with the manifest.

    Raises:
        CheckpointError: it is damaged; the message names each damage.
    """
    discovery.verify(folder, manifest.read(folder))


def verified(directory: Path) -> list[tuple[int, int]]:
    """Return sequence number and step of each checkpoint in a folder that can be restored, every byte read."""
    ages = []
    for found in discovery.find(directory, "checkpoint"):
        with contextlib.suppress(CheckpointError):
            described = discovery.check_quickly(found)
            reader.verify_loadable(found.path, described)
            ages.append(described.age)
    return ages


def is_allowed_name(name: str) -> bool:
    """Whether a checkpoint may hold a file of this name: inside its folder, on every system."""
    return not untrusted.path_problem(name)


def write_part(folder: Path, name: str, state: Any) -> None:
    """Write the files of one part, as a save of one process does.

    Raises:
        CheckpointError: the state holds what cannot be saved.
    """
    for file in whole(name, 0, Held(*codec.encode(name, state))):
        file.write(folder)


def read_part(folder: Path, name: str) -> Any:
    """Read the state of one part, as a restore of one process does; it can be saved again."""
    with CheckpointReader(folder, {name: reads.names_in(folder)}) as opened:
        state = opened.state(name)
    codec.encode(name, state)
    return state


def read_manifest(folder: Path) -> list[str]:
    """Read a checkpoint's manifest; returns the names of the files that are of no part."""
    manifest.read_age(folder)
    described = manifest.read(folder)
    assert described.total_bytes is not None
    return list(described.extra_files())


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Read a safetensors file, in each of the ways in which one is read."""
    with CheckpointReader(path.parent, {path.stem: [path.name]}) as opened:
        opened.index(path.stem)
    tensor_file.check(path)
    return tensor_file.read(path)


def read_shard_index(path: Path, shards: Collection[str]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Read the index of a sharded part; returns shape and dtype of each tensor."""
    return {name: (tuple(saved.shape), saved.dtype) for name, saved in shard_index.read(path, shards).items()}


def read_archive(path: Path) -> Any:
    """Read a file of `torch.save`; what is read can be saved."""
    state = state_files.read_archive(path)
    codec.encode("part", state)
    if isinstance(state, dict) and "python" in state:
        trainer_files.read_random_states(path)
    return state


def read_foreign_state(folder: Path) -> None:
    """Read the `trainer_state.json` of another program; each part made of it can be saved."""
    found = trainer_files.read_trainer_state(folder)
    for part in (
        trainer_files.trainer_state_part(found),
        trainer_files.callbacks_part(found),
        trainer_files.run_part(found, 1),
    ):
        codec.encode("part", part)


def read_weight_map(path: Path) -> dict[str, str]:
    """Read the index of a model that is split into files; returns the file of each weight."""
    return state_files.weight_map(path)


def show_state(folder: Path) -> None:
    """Read what `trainer ckpt ls` shows of a checkpoint's `trainer_state.json`."""
    state = selection.read_state(folder)
    selection.best_step(state)
    if (metric := selection.key_metric(folder, state, 3)) is not None:
        f"{metric[1]:.5g}"


def compare_state(path: Path, other: Any) -> list[Any]:
    """Compare a JSON file with another state as `trainer ckpt diff` does; returns the differences.

    Raises:
        CheckpointError: also where it is nested too deeply.
    """
    try:
        return list(compare_values(CheckpointReader(path.parent, {}).encoded(path.stem), other, "state"))
    except RecursionError as error:  # as the command says it
        raise CheckpointError("nested too deeply") from error


def check_answers(repository: HubRepository, api: Any, checkpoint: Path) -> list[tuple[str, str]]:
    """Resume from what a Hub's client answers, up to the first download.

    Args:
        repository: a repository of that Hub.
        api: takes the place of the client; None keeps it.
        checkpoint: a checkpoint whose files the commit should hold.

    Returns:
        Folder and path of each file that would be downloaded.

    Raises:
        CheckpointError: the answers are not valid, or the files are others.
        PushError: a request failed.
    """
    held = repository.but(repo_id="run")
    held._api = api
    try:
        held.make()
    except PushError:
        held.repo_id = "run"
    commit = resume.commit_of(held)
    folders = commit.folders((MANIFEST, "trainer_state.json"))
    paths = [(name, path) for name in folders for path in commit.below(name)]
    for name in folders:
        resume.check_sizes(commit, name, manifest.read(checkpoint))
    resume.earlier_commits(commit)
    return paths
