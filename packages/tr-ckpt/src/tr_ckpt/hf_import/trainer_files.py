"""Read a checkpoint that transformers' Trainer wrote, as the states of our parts.

`read` returns a `ForeignCheckpoint`. It reads the state of each part on access: the optimizer, the
schedule, `trainer_state.json` and the random states. State split over several processes (FSDP, DeepSpeed) is
refused, because only the program that wrote it can join it.
"""

from __future__ import annotations

import fnmatch
import math
import re
import stat
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch

from tr_ckpt import names, reads, untrusted
from tr_ckpt.errors import CheckpointError, DamagedCheckpointError, UnreadableError
from tr_ckpt.hf_import import state_files
from tr_ckpt.names import step_of
from tr_log.formatting import printable

Key = TypeVar("Key", str, int)


class States(Mapping[Key, Any], Generic[Key]):
    """States that are read on every access, without a cache.

    Args:
        readers: the function that reads each state.
    """

    def __init__(self, readers: Mapping[Key, Callable[[], Any]]) -> None:
        self._readers = dict(readers)

    def __getitem__(self, key: Key) -> Any:
        return self._readers[key]()

    def __iter__(self) -> Iterator[Key]:
        return iter(self._readers)

    def __len__(self) -> int:
        return len(self._readers)


@dataclass(frozen=True)
class ForeignCheckpoint:
    """A checkpoint of another program.

    Attributes:
        program: the program that wrote it, for messages.
        path: its folder.
        step: completed optimizer steps.
        world_size: number of processes that saved, as far as the files show.
        states: the state of each part that ranks share, under tr-core's names: `model`, `optimizer`,
            `scheduler`, `run` and so on. Read on access, which raises `CheckpointError` if its file does not exist,
            is damaged, or holds anything but plain state.
        random_states: the state of the part `rng`, of each rank.
        parts: the parts that it holds, under these names.
        plain_files: names of its files that belong to a model: configuration, tokenizer.
        notes: what is not imported, one sentence each.
    """

    program: str
    path: Path
    step: int
    world_size: int
    states: Mapping[str, Any]
    random_states: Mapping[int, Any]
    parts: tuple[str, ...]
    plain_files: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def has(self, part: str, rank: int) -> bool:
        """Whether it holds the state of a part for a rank."""
        return rank in self.random_states if part in names.PER_RANK else part in self.states

    def state(self, part: str, rank: int) -> Any:
        """Return a part's state for a rank.

        Raises:
            CheckpointError: its file does not exist, is damaged, or holds anything but plain state.
        """
        return self.random_states[rank] if part in names.PER_RANK else self.states[part]


_JOIN_FSDP = (
    "merge the weights with `accelerate merge-weights {folder}/pytorch_model_fsdp_0 OUTPUT` and begin a new run with "
    "them, or have transformers go on for a step on one process without FSDP and save"
)
_JOIN_DEEPSPEED = (
    "join the weights with `python {folder}/zero_to_fp32.py {folder} OUTPUT` and begin a new run with them; the "
    "optimizer's state is in a form that only DeepSpeed reads"
)
_JOIN_OTHER = "have the program that wrote it save model and optimizer whole, in one file each"

# Patterns of files and folders, by the kind of training that leaves them, and how to join the pieces.
_SHARDED_FILES = (
    ("FSDP", ("pytorch_model_fsdp*", "optimizer_[0-9]*", "optimizer.bin"), _JOIN_FSDP),
    ("DeepSpeed", ("global_step[0-9]*", "zero_to_fp32.py", "zero_pp_rank_*"), _JOIN_DEEPSPEED),
    ("FSDP on XLA or SageMaker", ("rank*-of-*", "optimizer.pt_*"), _JOIN_OTHER),
)


def refuse_sharded(folder: Path) -> None:
    """Refuse a folder whose state is in pieces.

    Raises:
        CheckpointError: it is; the message names the files, and says how to join them.
    """
    for kind, patterns, remedy in _SHARDED_FILES:
        seen = [name for name in reads.names_in(folder) if any(fnmatch.fnmatchcase(name, each) for each in patterns)]
        if seen:
            raise CheckpointError(
                f"its state is in pieces that training with {kind} left ({', '.join(seen)}), which are not read here: "
                + remedy.format(folder=folder.name)
            )


TRAINER_STATE = "trainer_state.json"

# The folders that are searched, if they exist.
_ENTRY_KINDS = {"log_history": list, "stateful_callbacks": dict}

# Entries of transformers' file that look like a callback and are not: flags that every event resets.
_CONTROL_CLASS = "TrainerControl"


def read_trainer_state(folder: Path) -> dict[str, Any]:
    """Return the content of the file; NaN and infinite numbers are accepted, although JSON has none.

    Raises:
        DamagedCheckpointError: it does not exist, is not JSON, or names no step.
        UnreadableError: it cannot be read.
    """
    untrusted.require_regular_file(folder / TRAINER_STATE)
    try:
        state = untrusted.read_json(folder / TRAINER_STATE, is_lax=True)
    except UnreadableError:
        raise
    except (OSError, CheckpointError) as error:
        raise DamagedCheckpointError(f"{TRAINER_STATE} cannot be read: {error}") from error
    step = state.get("global_step") if isinstance(state, dict) else None
    if type(step) is not int or not 0 <= step < 10**18:
        raise DamagedCheckpointError(f"{TRAINER_STATE} holds no global_step, the number of completed steps")
    for name, kind in _ENTRY_KINDS.items():
        if not isinstance(state.get(name), kind | None):
            raise DamagedCheckpointError(f"{TRAINER_STATE} holds a {type(state[name]).__name__} as {name}")
    return state


def trainer_state_part(state: dict[str, Any]) -> dict[str, Any]:
    """Return the state of the part `trainer_state`: the log history, the best metric, the counters."""
    own = {name: value for name, value in state.items() if name != "stateful_callbacks"}
    metric, folder = own.get("best_metric"), own.get("best_model_checkpoint")
    if isinstance(metric, float) and not math.isfinite(metric) and own.get("best_global_step") is None:
        own["best_metric"] = None  # its initial value, if no evaluation gave a number
    if own.get("best_global_step") is None and isinstance(folder, str):  # older versions saved only the folder
        own["best_global_step"] = step_of(Path(folder).name, "checkpoint")
    if own.get("log_history") is None:
        own["log_history"] = []
    return own


def callbacks_part(state: dict[str, Any]) -> dict[str, Any]:
    """Return the state of the part `callbacks`: the attributes of each, a second of one class as `Name#2`."""
    found: dict[str, Any] = {}
    for name, saved in (state.get("stateful_callbacks") or {}).items():
        for number, one in enumerate(saved if isinstance(saved, list) else [saved], start=1):
            attributes = one.get("attributes") if isinstance(one, dict) else None
            if name != _CONTROL_CLASS and isinstance(attributes, dict):
                found[name if number == 1 else f"{name}#{number}"] = attributes
    return found


def run_part(state: dict[str, Any], world_size: int) -> dict[str, Any]:
    """Return the state of the part `run`: what the data position is derived from, as the file does not hold it."""
    known = {name: state.get(name) for name in ("global_step", "epoch", "max_steps", "train_batch_size")}
    return {"foreign": {**known, "world_size": world_size}}


# Attributes that only the state of transformers' GreedyLR has.
_GREEDY = "reset_start_original"


def scheduler_part(saved: dict[str, Any]) -> dict[str, Any]:
    """Return the state of the part `scheduler`. For torch's own schedules it is unchanged."""
    state = {name: value for name, value in saved.items() if name != "verbose"}  # whether to print, before torch 2.7
    if _GREEDY not in state:
        return state
    try:
        return _greedy(state)
    except (KeyError, TypeError, AttributeError) as error:
        raise DamagedCheckpointError(f"the schedule's state lacks required content: {error!r}") from error


def _greedy(state: dict[str, Any]) -> dict[str, Any]:
    limit, left = state.pop(_GREEDY), state.pop("reset_start")
    return {
        **{name: value for name, value in state.items() if name not in ("_init_lrs", "_streaming_avg")},
        "first_rates": state["_init_lrs"],
        "reset_start": limit,
        "rows_at_least": limit - left,
        "results": list(state.get("_streaming_avg", {}).get("values", [])),
    }


# Kinds of devices whose generators are restored here; those of other kinds are not imported.
_DEVICES = ("cuda", "xpu", "mps")


def find_random_states(folder: Path) -> dict[int, str]:
    """Return the names of the files with random states, by rank."""
    if reads.is_file(folder / "rng_state.pth"):
        return {0: "rng_state.pth"}
    matches = (re.fullmatch(r"rng_state_(0|[1-9][0-9]{0,5})\.pth", name) for name in reads.names_in(folder))
    return dict(sorted((int(match[1]), match[0]) for match in matches if match))


def read_random_states(path: Path) -> dict[str, Any]:
    """Return the random states of one rank: of Python, NumPy, torch on the host and, as a list, on its devices.

    Raises:
        CheckpointError: the file holds anything but plain state.
        DamagedCheckpointError: it is damaged.
    """
    saved = state_files.read_archive(path)
    try:
        version, words, gauss = saved["python"]
        words = torch.tensor(words, dtype=torch.int64)
        if words.ndim != 1:
            raise ValueError(f"words of shape {tuple(words.shape)}")
        state: dict[str, Any] = {
            "python": {"version": version, "words": words, "gauss": gauss},
            "torch": saved["cpu"],
        }
        if "numpy" in saved:
            algorithm, keys, position, has_gauss, gauss = saved["numpy"]
            state["numpy"] = {
                "algorithm": algorithm,
                "keys": keys.to(torch.int64),
                "position": int(position),
                "has_gauss": int(has_gauss),
                "gauss": float(gauss),
            }
        for kind in _DEVICES:
            if kind in saved:
                held = saved[kind]
                state[kind] = list(held) if isinstance(held, list | tuple) else [held]
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError, OverflowError) as error:
        raise DamagedCheckpointError(f"{path.name} lacks required content: {error!r}") from error
    return state


PROGRAM = "transformers' Trainer"

_STATE_FILES = {"optimizer": "optimizer.pt", "scheduler": "scheduler.pt", "scaler": "scaler.pt"}

# This file remains if transformers was stopped by a signal while it saved.
_UNFINISHED = "checkpoint-is-incomplete.txt"

# Not plain files: pickles, and weights, which become the part `model`.
_NOT_PLAIN = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".safetensors")


def recognises(path: Path) -> bool:
    """Whether a folder looks like a checkpoint of this program."""
    return reads.is_file(path / TRAINER_STATE)


def read(path: Path) -> ForeignCheckpoint:
    """Return the checkpoint in a folder; the state of each part is read on access.

    Raises:
        CheckpointError: optimizer and model are in pieces of several processes.
        DamagedCheckpointError: `trainer_state.json` is damaged.
    """
    if reads.is_there(path / _UNFINISHED):
        raise DamagedCheckpointError(f"it holds {_UNFINISHED}: the process that wrote it was stopped meanwhile")
    refuse_sharded(path)
    reached = read_trainer_state(path)
    of_ranks = find_random_states(path)
    world_size = max(of_ranks, default=0) + 1
    readers: dict[str, Callable[[], Any]] = {
        state_files.weights_part(path): partial(state_files.read_weights, path),
        **{part: partial(_state, path / file, part) for part, file in _STATE_FILES.items()},
        "run": partial(run_part, reached, world_size),
        "callbacks": partial(callbacks_part, reached),
        "trainer_state": partial(trainer_state_part, reached),
    }
    rngs = {rank: partial(read_random_states, path / file) for rank, file in of_ranks.items()}
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
    state = state_files.read_archive(file)
    if not isinstance(state, dict):
        raise CheckpointError(f"{file.name} holds a {type(state).__name__} and not a state by name")
    return scheduler_part(state) if part == "scheduler" else state


def _parts(path: Path, *, has_random_states: bool) -> tuple[str, ...]:
    files = [part for part, file in _STATE_FILES.items() if reads.is_file(path / file)]
    model = [state_files.weights_part(path)] if state_files.find_weights(path) else []
    return (*model, *files, *(["rng"] if has_random_states else []), "run", "callbacks", "trainer_state")


def _plain_files(path: Path) -> tuple[str, ...]:
    taken = (TRAINER_STATE, *state_files.INDEXES)
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
