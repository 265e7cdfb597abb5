"""Read a checkpoint that transformers' Trainer wrote."""

from __future__ import annotations

import stat
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from tr_ckpt import reads
from tr_ckpt.errors import CheckpointError, DamagedCheckpointError
from tr_ckpt.foreign import archive, random_states, schedules, sharding, trainer_state, weights
from tr_ckpt.foreign.checkpoint import ForeignCheckpoint, States
from tr_ckpt.printable import printable

PROGRAM = "transformers' Trainer"

_STATE_FILES = {"optimizer": "optimizer.pt", "scheduler": "scheduler.pt", "scaler": "scaler.pt"}

# Left where that program was stopped while saving on a signal.
_UNFINISHED = "checkpoint-is-incomplete.txt"

# What is no plain file: pickles, and weights, which become the part `model`.
_NOT_PLAIN = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".safetensors")


def recognises(path: Path) -> bool:
    """Whether a folder looks like a checkpoint of this program."""
    return reads.is_file(path / trainer_state.FILE)


def read(path: Path) -> ForeignCheckpoint:
    """Return what a folder holds; the state of each part is read when it is asked for.

    Raises:
        CheckpointError: optimizer and model are in pieces of several processes.
        DamagedCheckpointError: `trainer_state.json` is damaged.
    """
    if reads.is_there(path / _UNFINISHED):
        raise DamagedCheckpointError(f"it holds {_UNFINISHED}: the process that wrote it was stopped meanwhile")
    sharding.refuse(path)
    reached = trainer_state.read(path)
    of_ranks = random_states.find(path)
    world_size = max(of_ranks, default=0) + 1
    readers: dict[str, Callable[[], Any]] = {
        weights.part_of(path): partial(weights.read, path),
        **{part: partial(_state, path / file, part) for part, file in _STATE_FILES.items()},
        "run": partial(trainer_state.place, reached, world_size),
        "callbacks": partial(trainer_state.callbacks, reached),
        "trainer_state": partial(trainer_state.reached, reached),
    }
    rngs = {rank: partial(random_states.read, path / file) for rank, file in of_ranks.items()}
    rngs = rngs or {0: partial(_state, path / "rng_state.pth", "rng")}
    return ForeignCheckpoint(
        program=PROGRAM,
        path=path,
        step=reached["global_step"],
        world_size=world_size,
        states=States(readers),
        random_states=States(rngs),
        parts=_parts(path, has_random_states=bool(of_ranks)),
        plain_files=_plain_files(path),
        notes=tuple(_notes(path)),
    )


def _state(file: Path, part: str) -> Any:
    if not reads.is_file(file):
        raise CheckpointError(
            f"there is no {file.name} in it, and without the state of {part!r} a run that goes on is another run. Give "
            "a checkpoint that was saved without save_only_model, or begin a new run with its weights"
        )
    state = archive.read(file)
    if not isinstance(state, dict):
        raise CheckpointError(f"{file.name} holds a {type(state).__name__} and not a state by name")
    return schedules.read(state) if part == "scheduler" else state


def _parts(path: Path, *, has_random_states: bool) -> tuple[str, ...]:
    files = [part for part, file in _STATE_FILES.items() if reads.is_file(path / file)]
    model = [weights.part_of(path)] if weights.find(path) else []
    return (*model, *files, *(["rng"] if has_random_states else []), "run", "callbacks", "trainer_state")


def _plain_files(path: Path) -> tuple[str, ...]:
    taken = (trainer_state.FILE, *weights.INDEXES)
    return tuple(
        sorted(
            name
            for name in reads.names_in(path)
            if Path(name).suffix not in _NOT_PLAIN
            and name not in taken
            and not name.startswith(".")
            and stat.S_ISREG(reads.status(path / name, follow=False).st_mode)
        )
    )


def _notes(path: Path) -> list[str]:
    notes = ["the place in the data is derived from the step, as no file holds it"]
    if reads.is_file(path / "training_args.bin"):
        notes.append(
            "training_args.bin is a pickle of a class, which could execute anything: it is not read, and the arguments "
            "are those of this run"
        )
    folders = [name for name in reads.names_in(path) if not name.startswith(".") and reads.is_folder(path / name)]
    if folders:
        notes.append(f"nothing is taken from the folders {printable(', '.join(folders))}")
    return notes
