"""Find where an option was written, and where an exception was raised."""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path

from tr_args import ArgumentsError, TrainingArguments
from tr_args import Problem as ArgumentProblem
from tr_args.errors import NOTHING
from tr_args.flags import FlagTable
from tr_core.preflight.report import Problem

_FROM_FILE = "file "
_COMMAND_LINE = "command line"


class Origins:
    """Returns where options were written: file and line, or flag, as exactly as possible."""

    def __init__(
        self, args: TrainingArguments | None = None, file: Path | None = None, words: Sequence[str] = ()
    ) -> None:
        self._args, self._file, self._words = args, file, words

    def __call__(self, name: str) -> str:
        """Return where the option `name` was written; `default` if it was not."""
        return self.locate(name, self._args.origin(name) if self._args is not None else "")

    def locate(self, name: str, source: str) -> str:
        """Return where `name` was written, from the kind of source in tr-args."""
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
    """Return the path for display: relative if it is below the current folder."""
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


# Packages whose frames the user cannot change.
_OWN_PACKAGES = ("tr_args", "tr_log", "tr_core", "tr_ckpt", "tr_optim", "tr_dist", "tr_all")
_FOREIGN_FOLDERS = ("site-packages", "dist-packages", *_OWN_PACKAGES)


def last_line(error: BaseException) -> str:
    """Return the last line of the traceback, whole: `ValueError: text`."""
    return "".join(traceback.format_exception_only(error)).strip()


def raised_at(error: BaseException) -> str:
    """Return `file:line in function` of the user's deepest frame; empty if there is none."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not _is_foreign(frame.filename)]
    if not own:
        return ""
    frame = own[-1]
    return f"{shown(frame.filename)}:{frame.lineno} in {frame.name}"


def passed_through(error: BaseException, function: str) -> bool:
    """Whether the exception came out of a function of this name, at any depth."""
    return any(frame.name == function for frame in traceback.extract_tb(error.__traceback__))


def comes_from(error: BaseException, package: str) -> bool:
    """Whether the deepest frame of the exception lies in a package."""
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and package in Path(frames[-1].filename).parts


def chain(error: BaseException | None) -> list[BaseException]:
    """Return an exception and all its causes, the last one first."""
    found: list[BaseException] = []
    while error is not None and error not in found:
        found.append(error)
        error = error.__cause__ or error.__context__
    return found


def _is_foreign(filename: str) -> bool:
    parts = Path(filename).parts
    return any(name in parts for name in _FOREIGN_FOLDERS) or filename.startswith("<") or "lib/python" in filename


def argument_problems(error: ArgumentsError, origin: Origins, *classes: type) -> Iterator[Problem]:
    """Yield a problem for each entry of an `ArgumentsError`."""
    table = FlagTable(classes)
    for problem in error.problems:
        yield Problem(_code(problem, table), str(problem), _origin(problem, origin))


def unsupported_problems(error: Exception, origin: Origins) -> Iterator[Problem]:
    """Yield one problem for each option that `refuse_unsupported` lists in its message."""
    heading, *lines = str(error).splitlines()
    for line in lines or [heading]:
        text = line.strip()
        name = text.partition("=")[0]
        value, _, instead = text.partition(": ")
        what = f"{value} cannot be used with this version; {instead}"
        yield Problem("T007", what if lines else text, origin(name) if name.isidentifier() else "")


def _code(problem: ArgumentProblem, table: FlagTable) -> str:
    if not problem.field:
        return "T004" if problem.origin.startswith("file") else "T002"
    is_known = table.flag(problem.field) if problem.field.startswith("-") else table.named(problem.field)
    if not is_known:
        return "T001"
    is_pair = bool(problem.others) or (problem.value is NOTHING and not problem.field.startswith("-"))
    return "T003" if is_pair else "T002"


def _origin(problem: ArgumentProblem, origin: Origins) -> str:
    if not problem.field:
        return problem.origin.removeprefix("file ")
    named = [(problem.field, problem.origin), *((name, source) for name, _, source in problem.others)]
    places = [origin.locate(name, source) for name, source in named if source != "default"]
    return ", ".join(dict.fromkeys(places))
