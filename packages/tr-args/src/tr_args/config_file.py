"""Let a mapping be given as the path of a file that holds it."""

from __future__ import annotations

import os
from typing import Any

from tr_args.constraints import Constraint
from tr_args.errors import ArgumentsError, RefusedError
from tr_args.files import read_mapping


class ConfigFile(Constraint):
    """A mapping, JSON text of one, or the path of a JSON, YAML or TOML file that holds one.

    None stands for the empty mapping.
    """

    def before(self, value: Any) -> Any:
        """Return what the file holds, if `value` is a path."""
        if value is None:
            return {}
        if isinstance(value, os.PathLike):
            value = os.fspath(value)
        if isinstance(value, str) and value and not value.lstrip().startswith("{"):
            try:
                return read_mapping(value)
            except ArgumentsError as error:
                raise RefusedError(f"needs a mapping or the path of a file; {error}") from None
        return value
