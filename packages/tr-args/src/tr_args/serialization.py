"""Convert arguments to plain values and back, and make relative folders absolute.

A folder is made absolute once, so that files go to the same folder after `os.chdir`. Written arguments hold the folder
as it was given.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any, Self, TypeVar

from tr_args.checked import Checked
from tr_args.constraints import NOT_UTF_8
from tr_args.conversion import is_dtype
from tr_args.errors import ArgumentsError, Problem
from tr_args.schema import FieldSpec, schema
from tr_log.masking import MASK, is_secret, mask_secrets

FOLDERS = ("output_dir", "logging_dir")

Arguments = TypeVar("Arguments", bound=Checked)


def make_folders_absolute(args: Arguments) -> Arguments:
    """Make `output_dir` and `logging_dir` absolute in place; addresses such as `gs://...` stay. Returns the arguments.

    This is not an assignment: the origin of the value and `num_assignments` stay. Written arguments hold the folder as
    it was given, because a path of this machine means nothing on another.

    Raises:
        ArgumentsError: a folder is relative, and the working directory is gone or not UTF-8 text.
    """
    for name in FOLDERS:
        folder = getattr(args, name)
        if not isinstance(folder, str) or "://" in folder or Path(folder).is_absolute():
            continue
        try:
            absolute = str(Path(folder).absolute())
            absolute.encode()
        except (FileNotFoundError, UnicodeEncodeError) as error:
            message = "is relative to a working directory that does not exist any more; give an absolute path"
            if isinstance(error, UnicodeEncodeError):
                message = f"in the working directory it {NOT_UTF_8}"
            raise ArgumentsError([Problem(name, folder, message, args.origin(name))]) from None
        object.__setattr__(args, name, absolute)
        # A new dict: a copy of the arguments may have another folder.
        given = {**vars(args).get("_given_folders", {}), name: (absolute, folder)}
        object.__setattr__(args, "_given_folders", given)
    return args


def as_given(args: Any, name: str) -> Any:
    """Return an argument's value; for a folder that was made absolute, the given path."""
    value = getattr(args, name)
    absolute, given = vars(args).get("_given_folders", {}).get(name, (None, None))
    return given if absolute is not None and value == absolute else value


class Serializable(Checked):
    """Arguments that can be written to JSON and read back. Secret values, and tokens within others, are masked."""

    def to_dict(self) -> dict[str, Any]:
        """Return the values by field name, as JSON types; secret ones as `<NAME>`.

        `from_dict` makes equal arguments from it, except for secret values.
        """
        return {
            name: mask(spec) if value is not None and spec.hides(value) else plain(value)
            for name, spec in schema(type(self)).items()
            for value in [as_given(self, name)]
        }

    def to_json_string(self) -> str:
        """Return `to_dict` as indented JSON."""
        return json.dumps(self.to_dict(), indent=2)

    def to_sanitized_dict(self) -> dict[str, Any]:
        """Return the values for trackers: booleans, numbers and text; everything else as text."""
        values = {**self.to_dict(), **self._derived()}
        return {name: value if type(value) in (bool, int, float, str) else str(value) for name, value in values.items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Return arguments with the given values; masked secrets are left at their defaults.

        Raises:
            ArgumentsError: names are unknown or values do not fit.
        """
        masks = {name: mask(spec) for name, spec in schema(cls).items()}
        return cls(**{name: value for name, value in values.items() if name not in masks or value != masks[name]})

    def _derived(self) -> dict[str, Any]:
        """Return the values that `to_sanitized_dict` adds."""
        return {}

    def __repr__(self) -> str:
        lines = (f"    {name}={value!r},\n" for name, value in self.to_dict().items())
        return f"{type(self).__name__}(\n{''.join(lines)})"

    __str__ = __repr__


def mask(spec: FieldSpec) -> str:
    """Return the text that replaces a secret value."""
    return f"<{spec.name.upper()}>"


def plain(value: Any) -> Any:
    """Return `value` as JSON types. Objects with `to_dict` become mappings, others become text.

    Text that looks like a token or a password is masked.
    """
    if isinstance(value, Enum):
        return plain(value.value)
    if isinstance(value, str):
        return mask_secrets(str(value))  # subclasses of str become str
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _element(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _element(str(key), element) for key, element in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(element) for element in value]
    if isinstance(value, os.PathLike):
        return mask_secrets(os.fsdecode(value))
    if is_dtype(type(value)):
        return str(value).removeprefix("torch.")
    describe = getattr(value, "to_dict", None)
    return plain(describe()) if callable(describe) and not isinstance(value, type) else str(value)


def _element(name: str, value: Any) -> Any:
    return MASK if is_secret(name, value) else plain(value)
