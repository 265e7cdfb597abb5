"""Read mappings from YAML, TOML and JSON files, strictly."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tr_args.errors import NOTHING, ArgumentsError, Problem, RefusedError


def read_mapping(path: str | os.PathLike[str], kind: str | None = None) -> dict[str, Any]:
    """Return the mapping in a file.

    YAML is read by the rules of YAML 1.2 for plain scalars: `5e-5` is a number, `no` is text. A key that is
    there twice is refused in every format. An empty YAML or TOML file is an empty mapping.

    Args:
        path: the file; `~` is the home folder.
        kind: `yaml`, `toml` or `json`; None goes by the file's ending.

    Raises:
        ArgumentsError: there is no such file, or it does not hold a mapping in its format; says where.
    """
    path = Path(path).expanduser()
    try:
        reader = _reader(path, kind)
        content = reader(path.read_text(encoding="utf-8-sig"))
        return {} if content is None else _checked(content)
    except FileNotFoundError:
        message = "does not exist"
    except UnicodeDecodeError:
        message = "is not UTF-8 text"
    except OSError as error:
        message = f"cannot be read: {error.strerror}"
    except RefusedError as refusal:
        message = str(refusal)
    raise ArgumentsError([Problem("", NOTHING, message, f"file {path}")])


def _reader(path: Path, kind: str | None) -> Callable[[str], Any]:
    ending = kind or path.suffix.lower().removeprefix(".")
    if ending not in _READERS:
        raise RefusedError(f"has the unknown ending {path.suffix!r}; needs .yaml, .yml, .toml or .json")
    return _READERS[ending]


def _checked(content: Any) -> dict[str, Any]:
    if not isinstance(content, dict):
        held = {list: "a list", str: "text", bool: "a truth value"}.get(type(content), "a number")
        raise RefusedError(f"holds {held}; needs a mapping of argument names to values")
    for key in content:
        if not isinstance(key, str):
            raise RefusedError(f"has the key {key!r}; needs names as keys")
    return content


def _read_json(text: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_unique)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise RefusedError(f"is not valid JSON: {where}: {error.msg}") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping: dict[str, Any] = {}
    for key, value in pairs:
        if key in mapping:
            raise RefusedError(f"has the key {key} twice; keep one")
        mapping[key] = value
    return mapping


def _read_toml(text: str) -> Any:
    import tomllib

    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise RefusedError(f"is not valid TOML: {error}") from None


def _read_yaml(text: str) -> Any:
    # Imported here because few programs read YAML and its import is most of this package's.
    from tr_args.yaml_loader import load

    return load(text)


_READERS: dict[str, Callable[[str], Any]] = {
    "json": _read_json,
    "toml": _read_toml,
    "yaml": _read_yaml,
    "yml": _read_yaml,
}
