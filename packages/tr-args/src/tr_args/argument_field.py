"""Declare a dataclass field together with how it appears on a command line."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any


def argument(
    *,
    aliases: str | list[str] | None = None,
    help: str | None = None,
    default: Any = dataclasses.MISSING,
    default_factory: Callable[[], Any] | Any = dataclasses.MISSING,
    metadata: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> Any:
    """Return a dataclass field with a help text and further flag names.

    Args:
        aliases: further flags, such as `"--lr"` or `["--lr", "-l"]`.
        help: text for `--help`; without it, the text under the field is used.
        default: the field's default.
        default_factory: makes the field's default.
        metadata: further metadata of the field; `choices` limits its values.
        **kwargs: passed on to `dataclasses.field`.
    """
    attached = dict(metadata or {})
    if aliases is not None:
        attached["aliases"] = aliases
    if help is not None:
        attached["help"] = help
    return dataclasses.field(metadata=attached, default=default, default_factory=default_factory, **kwargs)
