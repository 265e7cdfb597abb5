"""Read mappings from YAML, TOML and JSON files, strictly."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tr_args.bounded_text import MOST_LEVELS, ContentError, check_depth, load_json, number, read_text
from tr_args.errors import NOTHING, ArgumentsError, Problem, RefusedError, cut

# A key of more dotted parts than there may be levels: each would cost the parser a walk through all those before it.
_PART = r"""(?:[\w-]++|"[^"\n]*+"|'[^'\n]*+')"""
_CHAIN = re.compile(rf"(?<![\w-]){_PART}(?:[ \t]*+\.[ \t]*+{_PART}){{{MOST_LEVELS}}}")


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
    try:
        reader, most_bytes = _reader(Path(path), kind)
        content = reader(read_text(path, most_bytes))
        return {} if content is None else _checked(content)
    except (RefusedError, ContentError) as refusal:
        raise ArgumentsError([Problem("", NOTHING, cut(str(refusal)), f"file {path}")]) from None
    except RecursionError:
        # Deeper than this is refused in words; whoever calls from far down may have less room.
        message = "cannot be read from so deep within other calls"
        raise ArgumentsError([Problem("", NOTHING, message, f"file {path}")]) from None


def _reader(path: Path, kind: str | None) -> tuple[Callable[[str], Any], int]:
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


def _read_toml(text: str) -> Any:
    import tomllib

    if match := _CHAIN.search(text):
        line = text.count("\n", 0, match.start()) + 1
        raise ContentError(f"is nested more than {MOST_LEVELS} levels deep, on line {line}")
    try:
        content = tomllib.loads(text, parse_float=number)
    except tomllib.TOMLDecodeError as error:
        raise RefusedError(f"is not valid TOML: {error}") from None
    except RecursionError:
        raise RefusedError(f"is nested more than {MOST_LEVELS} levels deep") from None
    except ValueError as error:
        if isinstance(error, ContentError):
            raise
        raise RefusedError(f"is not valid TOML: {error}") from None
    check_depth(content)
    return content


def _read_yaml(text: str) -> Any:
    # Imported here because few programs read YAML and its import is most of this package's.
    from tr_args.yaml_loader import load

    return load(text)


_READERS: dict[str, tuple[Callable[[str], Any], int]] = {
    "json": (load_json, 16 << 20),
    "toml": (_read_toml, 4 << 20),
    "yaml": (_read_yaml, 1 << 20),  # half a megabyte is read in a second
    "yml": (_read_yaml, 1 << 20),
}
