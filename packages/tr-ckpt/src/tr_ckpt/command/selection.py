"""Find the checkpoints that a command line names, and read what a checkpoint records about its run.

That is the best step, and the metric that decides which step is best.
"""

from __future__ import annotations

import json
import math
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tr_ckpt import discovery, manifest, names
from tr_ckpt.discovery import Found
from tr_ckpt.errors import CheckpointError, DamagedCheckpointError
from tr_ckpt.manifest import Manifest

COMPLETE, DAMAGED, FOREIGN, UNREADABLE = "complete", "damaged", "foreign", "not readable"


@dataclass(frozen=True)
class Entry:
    """A checkpoint as a command shows it.

    Attributes:
        found: its name and folder.
        condition: `complete`, `damaged`, `foreign` (another program's) or `not readable` by this version.
        problem: what is wrong, in words; empty if it is complete.
        described: its manifest, if that could be read.
    """

    found: Found
    condition: str
    problem: str = ""
    described: Manifest | None = None

    @property
    def step(self) -> int | None:
        """Its step, if known."""
        return self.found.step if self.described is None else self.described.step


def select(directory: Path, prefix: str) -> list[Entry]:
    """Return the checkpoint `directory` itself, or those in it, the newest last.

    Raises:
        CheckpointError: there is none.
    """
    if not directory.is_dir():
        what = "is a file" if directory.exists() else "does not exist"
        raise CheckpointError(f"{directory} {what}; give a run's output folder, or one checkpoint in it")
    one = Found(names.step_of(directory.absolute().name, prefix), directory.absolute().name, directory)
    if (directory / names.MANIFEST).exists():
        return [examine(one)]
    if found := discovery.by_age(directory, prefix):
        return [examine(each) for each in found]
    if one.step is not None or discovery.is_foreign(directory):  # an output folder may hold a trainer's state too
        return [examine(one)]
    raise CheckpointError(
        f"no checkpoint in {directory}: it holds neither a {names.MANIFEST} nor a folder {prefix}-<step>"
    )


def select_one(path: Path, prefix: str) -> Entry:
    """Return the checkpoint `path` itself, or the newest complete one in it.

    Raises:
        CheckpointError: there is none, or it is damaged, or another program's.
    """
    entries = select(path, prefix)
    if usable := newest(entries):
        return usable
    entry = entries[-1]
    hint = "; `trainer ckpt import` makes one of ours of it" if entry.condition == FOREIGN else ""
    raise CheckpointError(f"{entry.found.path}: {entry.problem}{hint}")


def newest(entries: list[Entry]) -> Entry | None:
    """Return the newest complete checkpoint, None if there is none."""
    return next((entry for entry in reversed(entries) if entry.condition == COMPLETE), None)


def examine(found: Found) -> Entry:
    """Check a checkpoint without reading the content of its files."""
    if discovery.is_foreign(found.path):
        return Entry(found, FOREIGN, "it was written by another program, as transformers' Trainer writes them")
    described = None
    try:
        described = manifest.read(found.path)
        discovery.check_quickly(found)
    except DamagedCheckpointError as error:
        return Entry(found, DAMAGED, str(error), described)
    except CheckpointError as error:
        return Entry(found, UNREADABLE, str(error), described)
    return Entry(found, COMPLETE, "", described)


def bytes_below(folder: Path, *, alone: bool = False) -> int:
    """Return the size of all files in a folder; with `alone` only of files with a single hard link."""
    total = 0
    for path in folder.rglob("*"):
        try:
            state = path.lstat()
        except OSError:  # removed in the meantime, or not accessible
            continue
        if stat.S_ISREG(state.st_mode) and not (alone and state.st_nlink > 1):
            total += state.st_size
    return total


# These metrics never choose a model.
_TIMES = ("_runtime", "_per_second", "_time")


def read_state(folder: Path) -> dict[str, Any]:
    """Return the content of `trainer_state.json`; empty if it does not exist or cannot be read."""
    return _read_object(folder / "trainer_state.json")


def best_step(state: dict[str, Any]) -> int | None:
    """Return the step of the best evaluation that `state` records."""
    step = state.get("best_global_step")
    if type(step) is int and 0 <= step < 10**18:
        return step
    _, _, number = str(state.get("best_model_checkpoint") or "").rpartition("-")
    return int(number) if number.isdecimal() and len(number) <= 18 else None


def key_metric(folder: Path, state: dict[str, Any], step: int | None) -> tuple[str, float] | None:
    """Return name and value of the metric that judges the model of `step`.

    It is the one that `metric_for_best_model` names; else the one whose best value the state holds; else `eval_loss`;
    else the last logged `loss`. None if the state holds none of these.
    """
    logged = state.get("log_history")
    history = [entry for entry in logged if isinstance(entry, dict)] if isinstance(logged, list) else []
    at_step: dict[str, float] = {}
    for entry in history:
        if entry.get("step") == step:
            at_step |= {name: value for name, given in entry.items() if (value := number(given)) is not None}
    for name in (*_metric_names(folder, state, history), "eval_loss"):
        if name in at_step:
            return name, at_step[name]
    losses = [value for entry in history if (value := number(entry.get("loss"))) is not None]
    return ("loss", losses[-1]) if losses else None


def number(value: Any) -> float | None:
    """Return a number of a JSON file, including infinities and NaN; None for anything else."""
    if isinstance(value, dict) and set(value) == {"$float"}:
        value = value["$float"]
    if value in ("nan", "inf", "-inf", "NaN", "Infinity", "-Infinity"):
        return float(value)
    if isinstance(value, bool) or (isinstance(value, int) and abs(value) >= 2**63):  # no plausible metric
        return None
    return value if isinstance(value, int | float) else None


def _metric_names(folder: Path, state: dict[str, Any], history: list[dict[str, Any]]) -> list[str]:
    chosen = _read_object(folder / "training_args.json").get("metric_for_best_model")
    if isinstance(chosen, str):
        return [chosen if chosen.startswith("eval_") else f"eval_{chosen}"]
    best = number(state.get("best_metric"))
    if best is None or math.isnan(best):
        return []
    at_best = [entry for entry in history if entry.get("step") == state.get("best_global_step")]
    return [
        name
        for entry in at_best
        for name, value in entry.items()
        if name.startswith("eval_") and not name.endswith(_TIMES) and number(value) == best
    ]


def _read_object(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}
