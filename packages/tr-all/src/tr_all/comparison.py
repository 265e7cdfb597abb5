"""Compare what two runs of one script logged, key by key, and the weights that they saved."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib import import_module
from itertools import zip_longest
from pathlib import Path
from typing import Any

# Endings of keys that hold times of the clock, memory, or an estimate made from them.
NOT_COMPARED = ("_runtime", "_per_second", "step_time", "total_flos", "_ms_per_step")
NOT_COMPARED_PARTS = ("_mem_",)
WEIGHTS = ("model*.safetensors", "adapter_model*.safetensors")


@dataclass
class Recorded:
    """What one run wrote down.

    Attributes:
        entries: of the log, for each Trainer in the order in which they were built: the step and its values.
        facts: what may explain a difference.
        begins: the facts of each time that a training began, which the facts of all summarize.
        ends: what identifies the weights at the end of each training.
    """

    entries: dict[int, list[tuple[int, dict[str, Any]]]] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    begins: list[dict[str, Any]] = field(default_factory=list)
    ends: list[str | None] = field(default_factory=list)

    @property
    def count(self) -> int:
        """How many entries were logged by all Trainers."""
        return sum(len(entries) for entries in self.entries.values())


@dataclass
class Key:
    """One key of the log in both runs.

    Attributes:
        name: the key.
        count: in how many pairs of entries it is.
        step: where the values part first; None if nowhere.
        theirs: the value there with transformers' Trainer; None where it is missing.
        ours: the value there with this one.
        largest: the largest difference of two numbers.
        relative: the largest difference of two numbers, divided by the larger one.
        largest_step: where that is.
    """

    name: str
    count: int = 0
    step: int | None = None
    theirs: Any = None
    ours: Any = None
    largest: float = 0.0
    relative: float = 0.0
    largest_step: int | None = None

    @property
    def equal(self) -> bool:
        """Whether all values are equal to the bit."""
        return self.step is None

    def add(self, step: int, theirs: Any, ours: Any) -> None:
        """Take in the values of one pair of entries."""
        self.count += 1
        if _same(theirs, ours):
            return
        if self.step is None:
            self.step, self.theirs, self.ours = step, theirs, ours
        if _is_number(theirs) and _is_number(ours):
            difference = abs(theirs - ours)
            finite = math.isfinite(difference)
            self.relative = max(self.relative, difference / max(abs(theirs), abs(ours)) if finite else math.inf)
            if self.largest_step is None or difference > self.largest or math.isnan(difference):
                self.largest, self.largest_step = difference, step


@dataclass
class Folder:
    """The weights that both runs saved in one folder.

    Attributes:
        name: the folder, seen from that of the run.
        different: names of tensors whose bits, shapes or types differ, or that only one run saved.
        count: how many tensors there are.
        renamed: how many have the same bits under other names.
    """

    name: str
    different: list[str]
    count: int
    renamed: int = 0


@dataclass
class Parting:
    """The first entries of the log that differ, {} where a run has no such entry.

    Attributes:
        trainer: which Trainer of the script, counted from 0.
        place: which of its entries, counted from 0.
        step: that of the entry.
        theirs: the values of the entry with transformers' Trainer.
        ours: the values with this one.
    """

    trainer: int
    place: int
    step: int
    theirs: dict[str, Any]
    ours: dict[str, Any]


@dataclass
class Comparison:
    """Two runs of one script, side by side.

    Attributes:
        theirs: the run on transformers' Trainer.
        ours: the run on this one.
        keys: those of the log, by name.
        parting: the first entries that differ; None if all are equal.
        folders: with weights saved by both.
        only: folders with weights saved by one run alone, in words.
    """

    theirs: Recorded
    ours: Recorded
    keys: dict[str, Key]
    parting: Parting | None
    folders: list[Folder]
    only: list[str]

    @property
    def weights_equal(self) -> bool:
        """Whether no weights differ: those at the end of each training, and those saved."""
        return self.theirs.ends == self.ours.ends and not self.only and not any(f.different for f in self.folders)

    @property
    def equal(self) -> bool:
        """Whether nothing differs."""
        return self.parting is None and self.weights_equal

    def differing(self) -> set[str]:
        """Return the keys whose values differ."""
        return {key.name for key in self.keys.values() if not key.equal}


def read_record(path: Path) -> Recorded:
    """Read what `tr_all.recording` wrote; nothing where the script built no Trainer."""
    recorded = Recorded()
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        event = json.loads(line)
        values = event["values"]
        if event["event"] == "log":
            recorded.entries.setdefault(event["trainer"], []).append((event["step"], values))
        elif event["event"] == "end":
            recorded.ends.append(values["weights"])
        else:
            recorded.facts.update(values)
            if event["event"] == "begin":
                recorded.begins.append({**values, "trainer": event["trainer"]})
    return recorded


def compare(theirs: Path, ours: Path) -> Comparison:
    """Compare two folders of runs."""
    first, second = (read_record(folder / "recorded.jsonl") for folder in (theirs, ours))
    keys: dict[str, Key] = {}
    parting = None
    for pair in _pairs(first, second):
        for name in sorted(pair.theirs.keys() | pair.ours.keys()):
            keys.setdefault(name, Key(name)).add(pair.step, pair.theirs.get(name), pair.ours.get(name))
        if parting is None and not _same_entry(pair.theirs, pair.ours):
            parting = pair
    folders, only = compare_weights(theirs, ours)
    return Comparison(first, second, keys, parting, folders, only)


def compared(name: str) -> bool:
    """Whether a key of the log is a result, and not a time of the clock or a figure of memory."""
    return not name.endswith(NOT_COMPARED) and not any(part in name for part in NOT_COMPARED_PARTS)


def compare_weights(theirs: Path, ours: Path) -> tuple[list[Folder], list[str]]:
    """Compare the weights below two folders; return the folders with weights of both, and those of one, in words."""
    first, second = _folders_with_weights(theirs), _folders_with_weights(ours)
    only = [f"{name} (transformers only)" for name in sorted(first.keys() - second.keys())]
    only += [f"{name} (ours only)" for name in sorted(second.keys() - first.keys())]
    return [_compare_folder(name, first[name], second[name]) for name in sorted(first.keys() & second.keys())], only


def _pairs(theirs: Recorded, ours: Recorded) -> Iterator[Parting]:
    nothing: tuple[int | None, dict[str, Any]] = (None, {})
    for trainer in sorted(theirs.entries.keys() | ours.entries.keys()):
        lists = theirs.entries.get(trainer, []), ours.entries.get(trainer, [])
        for place, (left, right) in enumerate(zip_longest(*lists, fillvalue=nothing)):
            values = [{name: value for name, value in entry.items() if compared(name)} for _, entry in (left, right)]
            if None not in (left[0], right[0]):  # the step is compared too
                values = [{"step": step, **entry} for (step, _), entry in zip((left, right), values, strict=True)]
            step = right[0] if left[0] is None else left[0]
            yield Parting(trainer, place, step or 0, *values)


def _same_entry(theirs: dict[str, Any], ours: dict[str, Any]) -> bool:
    return theirs.keys() == ours.keys() and all(_same(value, ours[name]) for name, value in theirs.items())


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _same(theirs: Any, ours: Any) -> bool:
    if isinstance(theirs, float) and isinstance(ours, float) and math.isnan(theirs) and math.isnan(ours):
        return True
    return bool(theirs == ours)


def _folders_with_weights(run: Path) -> dict[str, list[Path]]:
    found: dict[str, list[Path]] = {}
    for pattern in WEIGHTS:
        for path in sorted(run.rglob(pattern)):
            found.setdefault(path.parent.relative_to(run).as_posix(), []).append(path)
    return found


def _compare_folder(name: str, theirs: list[Path], ours: list[Path]) -> Folder:
    safetensors = import_module("safetensors")
    with ExitStack() as stack:
        sides: list[dict[str, Any]] = []
        for paths in (theirs, ours):
            files = [stack.enter_context(safetensors.safe_open(path, framework="pt")) for path in paths]
            sides.append({key: file for file in files for key in file.keys()})  # noqa: SIM118 (no mapping)
        shared, count = sides[0].keys() & sides[1].keys(), max(map(len, sides))
        different = [key for key in sorted(shared) if not _same_tensor(sides[0][key], sides[1][key], key)]
        lone = [sorted(side.keys() - shared) for side in sides]
        contents = [sorted(_content(side[key], key) for key in keys) for side, keys in zip(sides, lone, strict=True)]
    if contents[0] == contents[1]:
        return Folder(name, different, count, len(lone[0]))
    return Folder(name, sorted({*different, *lone[0], *lone[1]}), count)


def _content(file: Any, name: str) -> str:
    tensor = file.get_tensor(name)
    data = tensor.contiguous().reshape(-1).view(import_module("torch").uint8).numpy().tobytes()
    return f"{tensor.dtype} {tuple(tensor.shape)} {hashlib.blake2b(data).hexdigest()}"


def _same_tensor(theirs: Any, ours: Any, name: str) -> bool:
    torch = import_module("torch")
    left, right = theirs.get_tensor(name), ours.get_tensor(name)
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    return torch.equal(*(each.contiguous().reshape(-1).view(torch.uint8) for each in (left, right)))
