"""Lay out the flags of a parser by topic, each with the help text of its field.

The help text of a field comes from its metadata, or from the string under it in the class.
"""

from __future__ import annotations

import argparse
import ast
import functools
import inspect
import textwrap
from collections.abc import Iterator
from enum import Enum
from typing import Any

from tr_args.aliases import aliases
from tr_args.flags import FieldAction, FlagTable
from tr_args.schema import FieldSpec, schema


def field_help(spec: FieldSpec) -> str:
    """Return the help text of a field on one line; empty if there is none."""
    text = spec.metadata.get("help") or _texts_under_fields(spec.owner).get(spec.name, "")
    return " ".join(text.split())


@functools.cache
def _texts_under_fields(cls: type) -> dict[str, str]:
    """Return the string literals under the fields of `cls`; none without source code."""
    try:
        source = textwrap.dedent(inspect.getsource(cls))
    except (OSError, TypeError):
        return {}
    definition = ast.parse(source).body[0]
    if not isinstance(definition, ast.ClassDef):
        return {}
    texts: dict[str, str] = {}
    for statement, after in zip(definition.body, definition.body[1:], strict=False):
        match statement, after:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                texts[name] = text
    return texts


def add_sections(parser: argparse.ArgumentParser, table: FlagTable) -> None:
    """Add a group to a parser, for its help page only, for every topic of every dataclass in `table`."""
    for cls in table.classes:
        topics: dict[str, list[FieldAction]] = {}
        for name in schema(cls):
            option = table.options[name]
            topics.setdefault(_topic(option.spec.owner), []).append(option)
        for topic, options in topics.items():
            parser.add_argument_group(topic)._group_actions += [_shown(option, table) for option in options]
        if former := sorted(aliases(cls)):
            names = ", ".join(f"--{name}" for name in former)
            parser.add_argument_group(description=_escaped(f"Former names still accepted: {names}."))


def _shown(option: FieldAction, table: FlagTable) -> argparse.Action:
    """Return an action as the help page shows it: with the text under the field, the default and all flags."""
    metavar = option.placeholder or option.metavar
    takes_one_or_none = option.spec.metadata.get("nargs") == "?" or (metavar and option.placeholder is None)
    text = field_help(option.spec)
    return argparse.Action(
        list(_flags(option, table)),
        option.dest,
        nargs="?" if takes_one_or_none else 0 if metavar is None else None,
        default=argparse.SUPPRESS,
        metavar=metavar,
        help=text if text == argparse.SUPPRESS else _escaped(f"{text}{_default(option)}"),
    )


def _flags(option: FieldAction, table: FlagTable) -> Iterator[str]:
    """Yield the flags of an option: its own, those of its metadata, and the negated one of a switch."""
    for name, other in table.options.items():
        if other is option:
            yield name if name.startswith("-") else f"--{name}"
    if option.placeholder is None:
        yield f"--no_{option.dest}"


def default_text(option: FieldAction) -> str:
    """Return an option's default as written on a command line; empty for None, lists and mappings."""
    default: Any = None if option.spec.required else option.spec.make_default()
    if isinstance(default, Enum):
        default = default.value
    if isinstance(default, bool):
        return str(default).lower()
    return str(default) if isinstance(default, (str, int, float)) and default != "" else ""


def _default(option: FieldAction) -> str:
    if option.spec.required or option.spec.must_be_given:
        return "" if option.spec.is_bare_switch else " (required)"
    text = default_text(option)
    return f" (default: {text})" if text and text != "false" else ""


def _topic(owner: type) -> str:
    return owner.__dict__.get("_title", owner.__dict__.get("_argument_group_name", owner.__name__))


def _escaped(text: str) -> str:
    return text.replace("%%", "%").replace("%", "%%")
