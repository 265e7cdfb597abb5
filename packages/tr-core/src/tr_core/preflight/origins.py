"""Find where the value of an option was written."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_FROM_FILE = "file "
_COMMAND_LINE = "command line"


class Origins:
    """Where options were written: file and line, or flag, as exactly as can be known.

    Args:
        args: the arguments, which know the kind of source of each value.
        file: the configuration file or script that is checked, if any.
        words: the words of its command line.
    """

    def __init__(self, args: Any = None, file: Path | None = None, words: Sequence[str] = ()) -> None:
        self._args, self._file, self._words = args, file, words

    def __call__(self, name: str) -> str:
        """Return where the option `name` was written; `default` if nowhere."""
        return self.locate(name, self._args.origin(name) if hasattr(self._args, "origin") else "")

    def locate(self, name: str, source: str) -> str:
        """Return where `name` was written, given the kind of source that tr-args names."""
        plain = name.removeprefix("--").replace("-", "_")
        flag = next((word for word in self._words if _is_flag(word, plain)), None)
        if source == _COMMAND_LINE or (flag is not None and source == "call"):
            return f"{_COMMAND_LINE} {(flag or f'--{plain}').partition('=')[0]}"
        file = Path(source.removeprefix(_FROM_FILE)) if source.startswith(_FROM_FILE) else self._file
        if source == "default" or file is None:
            return source
        line = line_of(file, plain)
        return shown(file) if line is None else f"{shown(file)}:{line}"


def shown(file: str | Path) -> str:
    """Return the path as a person reads it: relative if it is below the current folder."""
    try:
        return str(Path(file).absolute().relative_to(Path.cwd()))
    except ValueError:
        return str(file)


def line_of(file: Path, name: str) -> int | None:
    """Return the number of the first line of a file that sets `name`: as `name:`, `"name":` or `name=`."""
    try:
        lines = file.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError):
        return None
    spelled = re.escape(name).replace("_", "[-_]")
    pattern = re.compile(rf"""(?<![\w.-])["']?{spelled}["']?\s*[:=](?!=)""")
    for number, line in enumerate(lines, start=1):
        if pattern.search(line.partition("#")[0]):
            return number
    return None


def _is_flag(word: str, name: str) -> bool:
    flag = word.partition("=")[0]
    if not flag.startswith("--"):
        return False
    return flag[2:].replace("-", "_").removeprefix("no_") == name.removeprefix("no_")
