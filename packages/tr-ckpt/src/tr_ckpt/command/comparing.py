"""`trainer ckpt diff`: print what differs between two checkpoints, part by part."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from tr_ckpt import files, names, parts
from tr_ckpt.command import selection
from tr_ckpt.command.differences import (
    TensorDifference,
    ValueDifference,
    compare_tensors,
    compare_values,
    opened_tensors,
)
from tr_ckpt.command.selection import Entry
from tr_ckpt.command.terminal import Column, Progress, render, say, say_lines, shorten, terminal_width
from tr_ckpt.errors import CheckpointError
from tr_ckpt.manifest import Manifest


@dataclass
class Comparison:
    """The differences in one part of two checkpoints.

    Attributes:
        name: of the part, or of a file without a part.
        values: the differing JSON values.
        tensors: the differing tensors.
        compared: how many tensors were compared.
    """

    name: str
    values: list[ValueDifference] = field(default_factory=list)
    tensors: list[TensorDifference] = field(default_factory=list)
    compared: int = 0

    @property
    def differs(self) -> bool:
        """Whether there is a difference."""
        return bool(self.values or self.tensors)


def run_diff(arguments: argparse.Namespace) -> int:
    """Compare two checkpoints; return 0 if they are equal, 1 if they differ."""
    first, second = (
        selection.select_one(Path(given).expanduser(), arguments.prefix)
        for given in (arguments.first, arguments.second)
    )

    def wanted(place: str) -> bool:
        return not any(fnmatchcase(place, pattern) for pattern in arguments.ignore)

    comparisons = compare(first, second, arguments.part, wanted, everything=arguments.manifest)
    print_report(first.found.path, second.found.path, comparisons, limit=None if arguments.all else 10)
    return int(any(comparison.differs for comparison in comparisons))


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
    names = list(dict.fromkeys((*one.parts, *other.parts)))
    if unknown := [name for name in only or () if name not in names]:
        raise CheckpointError(f"neither has the part {unknown[0]!r}; there are {', '.join(names)}")
    progress = Progress(one.total_bytes + other.total_bytes)
    reader = _Reader(first.found.path, second.found.path, wanted, progress)
    try:
        compared = [] if only else [_compare_manifests(one, other, wanted, everything)]
        for name in only or names:
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

    differences = compare_values(compared_fields(one), compared_fields(other), "manifest")
    return Comparison("manifest", [each for each in differences if wanted(each.place)])


@dataclass(frozen=True)
class _Reader:
    """Reads two checkpoints, a part at a time."""

    first: Path
    second: Path
    wanted: Callable[[str], bool]
    progress: Progress

    def compare_part(self, name: str, mine: list[str] | None, theirs: list[str] | None) -> Comparison:
        if mine is None or theirs is None:
            return _alone(name, mine is not None)
        result = Comparison(name)
        for stem in dict.fromkeys((*_stems(mine), *_stems(theirs))):
            file = f"{stem}.json"
            if file not in mine or file not in theirs:
                result.values.append(ValueDifference(stem, "only in A" if file in mine else "only in B"))
                continue
            values = compare_values(parts.read_json(self.first / file), parts.read_json(self.second / file), stem)
            result.values += [each for each in values if self.wanted(each.place)]
            self._compare_tensors(result, stem, mine, theirs)
        return result

    def _compare_tensors(self, result: Comparison, stem: str, mine: list[str], theirs: list[str]) -> None:
        with opened_tensors(self.first, stem, mine) as one, opened_tensors(self.second, stem, theirs) as other:
            for place, difference in compare_tensors(one, other, stem, self.wanted):
                result.compared += 1
                if difference is not None:
                    result.tensors.append(difference)
                name = place.removeprefix(f"{stem}.")
                self.progress.begin(place)
                self.progress.advance(one.size_bytes(name) + other.size_bytes(name))

    def compare_file(self, name: str, in_first: bool, in_second: bool) -> Comparison:
        if not (in_first and in_second):
            return _alone(name, in_first)
        result = Comparison(name)
        if name.endswith(".json"):
            try:
                values = compare_values(parts.read_json(self.first / name), parts.read_json(self.second / name), name)
                result.values += [each for each in values if self.wanted(each.place)]
                return result
            except CheckpointError:
                pass  # not strict JSON: compared as bytes
        one, other = (files.record(folder / name) for folder in (self.first, self.second))
        if one != other and self.wanted(name):
            text = "other bytes" if one.bytes == other.bytes else f"{one.bytes:,} bytes -> {other.bytes:,} bytes"
            result.values.append(ValueDifference(name, text))
        return result


def _stems(of_part: list[str]) -> list[str]:
    return [
        file.removesuffix(".json")
        for file in of_part
        if file.endswith(".json") and not file.endswith(names.INDEX_SUFFIX)
    ]


def _alone(name: str, in_first: bool) -> Comparison:
    return Comparison(name, [ValueDifference(name, "only in A" if in_first else "only in B")])


_INDENT = "  "


def print_report(first: Path, second: Path, comparisons: Sequence[Comparison], limit: int | None) -> None:
    """Print the differences of each part, the largest first.

    Args:
        first: the folder of A.
        second: the folder of B.
        comparisons: of all parts, including equal ones.
        limit: how many values, and how many tensors, of a part are shown; None shows all.
    """
    width = terminal_width()
    say(f"A: {first}")
    say(f"B: {second}")
    hidden = 0
    for comparison in (each for each in comparisons if each.differs):
        say()
        say(f"{comparison.name}: {_summary(comparison)}")
        values = sorted(comparison.values, key=lambda each: -each.size)
        for value in values[:limit]:
            say(shorten(f"{_INDENT}{value.place}: {value.text}", width))
        tensors = sorted(comparison.tensors, key=lambda each: each.size, reverse=True)[:limit]
        if tensors:
            if values:
                say()
            table = render(_columns(tensors), None if width is None else width - len(_INDENT))
            say_lines(textwrap.indent(table, _INDENT))
        left = len(values) - len(values[:limit]) + len(comparison.tensors) - len(tensors)
        if left:
            say(f"{_INDENT}… and {left} more")
        hidden += left
    equal = [each.name for each in comparisons if not each.differs]
    say()
    say(f"equal: {', '.join(equal)}" if equal else "nothing is equal")
    if hidden:
        say(f"{hidden} smaller differences are not shown; --all shows them")


def _summary(comparison: Comparison) -> str:
    said = []
    if comparison.values:
        said.append(f"{len(comparison.values)} value{_s(comparison.values)}")
    if comparison.tensors:
        said.append(f"{len(comparison.tensors)} of {comparison.compared} tensors")
    one = len(comparison.values) == 1 and not comparison.tensors
    return f"{' and '.join(said)} differ{'s' * one}"


def _s(counted: Sequence[object]) -> str:
    return "" if len(counted) == 1 else "s"


def _columns(tensors: Sequence[TensorDifference]) -> list[Column]:
    return [
        Column("tensor", [each.place for each in tensors]),
        Column("dtype", [" -> ".join(each.dtypes) for each in tensors], spare=3 * _all_alike(tensors)),
        Column("shape", [" -> ".join(each.shapes) for each in tensors]),
        Column("max |B-A|", [_number(each, each.largest) for each in tensors], right=True),
        Column("relative", [_number(each, each.relative) for each in tensors], right=True),
        Column("elements", [_elements(each) for each in tensors], right=True, spare=4),
        Column("NaN", [_undefined(each) for each in tensors]),
        Column("", [each.note for each in tensors]),
    ]


def _all_alike(tensors: Sequence[TensorDifference]) -> bool:
    return all(len(each.dtypes) == 1 for each in tensors)


def _number(tensor: TensorDifference, value: float) -> str:
    return f"{value:.3g}" if tensor.elements else ""


def _elements(tensor: TensorDifference) -> str:
    return f"{tensor.changed:,} of {tensor.elements:,}" if tensor.elements else ""


def _undefined(tensor: TensorDifference) -> str:
    return f"{tensor.undefined[0]:,} -> {tensor.undefined[1]:,}" if any(tensor.undefined) else ""
