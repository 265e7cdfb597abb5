"""Print what differs between two checkpoints, part by part."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tr_ckpt.command.table import Column, render, say, say_lines, shorten, terminal_width
from tr_ckpt.command.tensor_differences import TensorDifference

if TYPE_CHECKING:
    from tr_ckpt.command.comparing import Comparison

_INDENT = "  "


def print_report(first: Path, second: Path, comparisons: Sequence[Comparison], limit: int | None) -> None:
    """Print the differences of each part, the largest first.

    Args:
        first: where A is.
        second: where B is.
        comparisons: of all parts, those that are equal too.
        limit: how many values, and how many tensors, of a part are shown; None is all.
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
