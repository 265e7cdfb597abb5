"""`trainer ckpt diff`: say of each part of two checkpoints how much of it differs, and what differs first.

Tensors are read one at a time, whether a part was saved whole or in shards. Values are compared as the JSON files hold
them.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch

from tr_ckpt import files, names
from tr_ckpt.command import selection
from tr_ckpt.command.selection import Entry
from tr_ckpt.command.terminal import Progress, say, shorten, terminal_width
from tr_ckpt.errors import CheckpointError
from tr_ckpt.manifest import Manifest
from tr_ckpt.reader import CheckpointReader
from tr_ckpt.shard_index import Index, SavedTensor

# A checkpoint, and where the tensors of a state in it are.
Opened = tuple[CheckpointReader, Index]

_ONLY_IN = {True: "only in A", False: "only in B"}

_LONGEST = 44  # characters shown of a value

_BLOCK = 2**20  # elements that are compared at once

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass
class Comparison:
    """The differences in one part of two checkpoints, each a line that begins with its path.

    Attributes:
        name: of the part, or of a file without a part.
        values: the differing JSON values, in the order of the file.
        tensors: the differing tensors, by name.
        compared: how many tensors were compared.
    """

    name: str
    values: list[str] = field(default_factory=list)
    tensors: list[str] = field(default_factory=list)
    compared: int = 0

    @property
    def differs(self) -> bool:
        """Whether there is a difference."""
        return bool(self.values or self.tensors)

    def summary(self) -> str:
        """Return how much differs."""
        said = []
        if self.values:
            said.append(f"{len(self.values)} value{'s' * (len(self.values) != 1)}")
        if self.tensors:
            said.append(f"{len(self.tensors)} of {self.compared} tensors")
        one = len(self.values) == 1 and not self.tensors
        return f"{' and '.join(said)} differ{'s' * one}"


def run_diff(arguments: argparse.Namespace) -> int:
    """Compare two checkpoints; return 0 if they are equal, 1 if they differ."""
    first, second = (
        selection.select_one(Path(given).expanduser(), arguments.prefix)
        for given in (arguments.first, arguments.second)
    )

    def wanted(place: str) -> bool:
        return not any(fnmatchcase(place, pattern) for pattern in arguments.ignore)

    comparisons = compare(first, second, arguments.part, wanted, everything=arguments.manifest)
    _print_report(first.found.path, second.found.path, comparisons, limit=None if arguments.all else 1)
    return int(any(comparison.differs for comparison in comparisons))


def _print_report(first: Path, second: Path, comparisons: Sequence[Comparison], limit: int | None) -> None:
    width = terminal_width()
    say(f"A: {first}")
    say(f"B: {second}")
    hidden = 0
    for comparison in (each for each in comparisons if each.differs):
        say()
        say(f"{comparison.name}: {comparison.summary()}")
        shown = (*comparison.values[:limit], *comparison.tensors[:limit])
        for line in shown:
            say(shorten(f"  {line}", width))
        hidden += len(comparison.values) + len(comparison.tensors) - len(shown)
    equal = [each.name for each in comparisons if not each.differs]
    say()
    say(f"equal: {', '.join(equal)}" if equal else "nothing is equal")
    if hidden:
        say(f"{hidden} more differences are not shown; --all shows them")


def compare(
    first: Entry, second: Entry, only: list[str] | None, wanted: Callable[[str], bool], *, everything: bool
) -> list[Comparison]:
    """Compare the parts and added files of two checkpoints; the result includes the equal ones.

    Args:
        first: a complete checkpoint.
        second: the other.
        only: parts to compare; None for all parts and all other files.
        wanted: whether to compare a value or tensor, given its path.
        everything: whether to compare times of saving and versions too.

    Raises:
        CheckpointError: neither has a part that `only` names, or a file is not in the format of a save.
    """
    one, other = first.described, second.described
    assert one is not None  # both are complete
    assert other is not None
    known = list(dict.fromkeys((*one.parts, *other.parts)))
    if unknown := [name for name in only or () if name not in known]:
        raise CheckpointError(f"neither has the part {unknown[0]!r}; there are {', '.join(known)}")
    progress = Progress(one.total_bytes + other.total_bytes)
    reader = _Reader(first.found.path, second.found.path, wanted, progress)
    try:
        compared = [] if only else [_compare_manifests(one, other, wanted, everything)]
        for name in only or known:
            compared.append(reader.compare_part(name, one.parts.get(name), other.parts.get(name)))
        if not only:
            added = dict.fromkeys((*one.extra_files(), *other.extra_files()))
            compared += [reader.compare_file(name, name in one.files, name in other.files) for name in added]
    finally:
        progress.end()
    return compared


def _compare_manifests(one: Manifest, other: Manifest, wanted: Callable[[str], bool], everything: bool) -> Comparison:
    def compared_fields(manifest: Manifest) -> dict[str, Any]:
        fields: dict[str, Any] = {"step": manifest.step, "world_size": manifest.world_size}
        if everything:
            fields |= {"saved_at": manifest.saved_at, "sequence": manifest.sequence, "versions": manifest.versions}
        return fields

    return Comparison("manifest", _differing(compared_fields(one), compared_fields(other), "manifest", wanted))


@dataclass(frozen=True)
class _Reader:
    """Reads two checkpoints, a part at a time."""

    first: Path
    second: Path
    wanted: Callable[[str], bool]
    progress: Progress

    def compare_part(self, name: str, mine: list[str] | None, theirs: list[str] | None) -> Comparison:
        if mine is None or theirs is None:
            return Comparison(name, [f"{name}: {_ONLY_IN[mine is not None]}"])
        result = Comparison(name)
        for stem in dict.fromkeys((*_stems(mine), *_stems(theirs))):
            file = f"{stem}.json"
            if file not in mine or file not in theirs:
                result.values.append(f"{stem}: {_ONLY_IN[file in mine]}")
                continue
            with (
                CheckpointReader(self.first, {name: mine}) as one,
                CheckpointReader(self.second, {name: theirs}) as other,
            ):
                result.values += _differing(one.encoded(stem), other.encoded(stem), stem, self.wanted)
                self._compare_tensors(result, stem, (one, one.index(name, stem)), (other, other.index(name, stem)))
        return result

    def compare_file(self, name: str, in_first: bool, in_second: bool) -> Comparison:
        if not (in_first and in_second):
            return Comparison(name, [f"{name}: {_ONLY_IN[in_first]}"])
        if name.endswith(".json"):
            one, other = (CheckpointReader(folder, {}) for folder in (self.first, self.second))
            stem = name.removesuffix(".json")
            try:
                return Comparison(name, _differing(one.encoded(stem), other.encoded(stem), name, self.wanted))
            except CheckpointError:
                pass  # not strict JSON: compared as bytes
        one, other = (files.record(folder / name) for folder in (self.first, self.second))
        if one == other or not self.wanted(name):
            return Comparison(name)
        text = "other bytes" if one.bytes == other.bytes else f"{one.bytes:,} bytes -> {other.bytes:,} bytes"
        return Comparison(name, [f"{name}: {text}"])

    def _compare_tensors(self, result: Comparison, stem: str, one: Opened, other: Opened) -> None:
        for name in sorted({*one[1], *other[1]}):
            place = f"{stem}.{name}"
            if not self.wanted(place):
                continue
            result.compared += 1
            self.progress.begin(place)
            if difference := _compare(one, other, name):
                result.tensors.append(f"{place}: {difference}")
            self.progress.advance(sum(index[name].size_bytes for _, index in (one, other) if name in index))


def _stems(of_part: list[str]) -> list[str]:
    states = [file for file in of_part if file.endswith(".json") and not file.endswith(names.INDEX_SUFFIX)]
    return [file.removesuffix(".json") for file in states]


def _compare(first: Opened, second: Opened, name: str) -> str:
    """Return how a tensor differs, in words; empty if all its bits are the same."""
    one, other = first[1].get(name), second[1].get(name)
    if one is None or other is None:
        return f"{_ONLY_IN[one is not None]}: {_kind(one or other)}"
    if _kind(one) != _kind(other):
        return f"{_kind(one)} -> {_kind(other)}"
    changed, gaps = 0, []
    for mine, theirs in _blocks(first[0].tensor(name, one), second[0].tensor(name, other)):
        bits, other_bits = (tensor.view(_BITS[tensor.element_size()]) for tensor in (mine, theirs))
        differing = bits != other_bits
        if count := int(differing.sum()):
            wide = torch.complex128 if mine.is_complex() else torch.float64
            changed += count
            # Chosen as bits: an older torch chooses nothing from float8.
            pair = [chosen[differing].view(mine.dtype).to(wide) for chosen in (bits, other_bits)]
            gaps.append((pair[0] - pair[1]).abs().max())
    if not changed:
        return ""
    return f"{_kind(one)}, {changed:,} of {math.prod(one.shape):,} elements, by up to {torch.stack(gaps).max():.3g}"


def _kind(tensor: SavedTensor | None) -> str:
    return "" if tensor is None else f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _blocks(one: torch.Tensor, other: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    one, other = one.contiguous().reshape(-1), other.contiguous().reshape(-1)
    for start in range(0, one.numel(), _BLOCK):
        yield one[start : start + _BLOCK], other[start : start + _BLOCK]


def _differing(one: Any, other: Any, place: str, wanted: Callable[[str], bool]) -> list[str]:
    return [f"{inside}: {text}" for inside, text in compare_values(one, other, place) if wanted(inside)]


def compare_values(one: Any, other: Any, place: str) -> Iterator[tuple[str, str]]:
    """Yield what differs between two values read from JSON, each as path and change, in the order of the first."""
    if isinstance(one, dict) and isinstance(other, dict):
        for name in dict.fromkeys((*one, *other)):
            inside = f"{place}.{name}" if name.isidentifier() else f"{place}[{name}]"
            if name in one and name in other:
                yield from compare_values(one[name], other[name], inside)
            else:
                yield inside, f"{_ONLY_IN[name in one]}: {_shown(one.get(name, other.get(name)))}"
    elif isinstance(one, list) and isinstance(other, list):
        for index, (mine, theirs) in enumerate(zip(one, other, strict=False)):
            yield from compare_values(mine, theirs, f"{place}[{index}]")
        if len(one) != len(other):
            yield place, f"{_items(one)} -> {_items(other)}"
    elif json.dumps(one) != json.dumps(other):
        yield place, f"{_shown(one)} -> {_shown(other)}"


def _items(of: list[Any]) -> str:
    return f"{len(of)} item{'s' * (len(of) != 1)}"


def _shown(value: Any) -> str:
    return shorten(json.dumps(value), _LONGEST)
