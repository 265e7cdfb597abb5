"""Read single files and values as a parser does, and the facts that arguments state of themselves."""

from __future__ import annotations

from typing import Any

from tr_args.constraints import Later, Only
from tr_args.conversion import convert_field
from tr_args.errors import ArgumentsError, Problem, RefusedError
from tr_args.files import read_mapping
from tr_args.schema import facts, facts_of_kind, schema
from tr_args.types.choices import MetricSchedule

__all__ = ["Later", "MetricSchedule", "Only", "convert_text", "facts", "facts_of_kind", "read_mapping"]


def convert_text(cls: type, name: str, text: str) -> Any:
    """Return the value of a dataclass's field that a command line or a variable gives as text.

    Args:
        cls: a dataclass of arguments.
        name: of the field.
        text: the value.

    Raises:
        ArgumentsError: it does not fit the type of the field.
    """
    try:
        return convert_field(schema(cls)[name], text)
    except RefusedError as refusal:
        raise ArgumentsError([Problem(name, text, str(refusal), "the text")]) from None
