"""Find where an option was written, and where an exception was raised."""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType

from tr_args import ArgumentsError, TrainingArguments
from tr_args import Problem as ArgumentProblem
from tr_args.errors import NOTHING
from tr_core.preflight.report import Problem

_FROM_FILE = "file "
_COMMAND_LINE = "command line"
# Files that the user cannot change.
_FOREIGN = re.compile(r"^<|lib/python|(site|dist)-packages|[/\\]tr_(args|log|core|ckpt|optim|dist|all)[/\\]")
_UNKNOWN = re.compile(r"unknown (argument|section)|argument \S+ no longer exists")


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
        flags = (word.partition("=")[0] for word in self._words if word.startswith("--"))
        spelled = (plain, f"no_{plain}", plain.removeprefix("no_"))
        flag = next((flag for flag in flags if flag[2:].replace("-", "_") in spelled), None)
        if source == _COMMAND_LINE or (flag is not None and source == "call"):
            return f"{_COMMAND_LINE} {flag or f'--{plain}'}"
        file = Path(source.removeprefix(_FROM_FILE)) if source.startswith(_FROM_FILE) else self._file
        if source == "default" or file is None:
            return source
        line = line_of(file, plain)
        return shown(file) if line is None else f"{shown(file)}:{line}"


def shown(file: str | Path) -> str:
    """Return the path for display: relative if it is below the current folder."""
    path = Path(file).absolute()
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(file)


def line_of(file: Path, name: str) -> int | None:
    """Return the number of the first line of a file that sets `name`: as `name:`, `"name":` or `name=`."""
    try:
        lines = file.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError):
        return None
    spelled = re.escape(name).replace("_", "[-_]")
    pattern = re.compile(rf"""(?<![\w.-])["']?{spelled}["']?\s*[:=](?!=)""")
    found = (number for number, line in enumerate(lines, start=1) if pattern.search(line.partition("#")[0]))
    return next(found, None)


def last_line(error: BaseException) -> str:
    """Return the last line of the traceback, whole: `ValueError: text`."""
    return "".join(traceback.format_exception_only(error)).strip()


def frames_of(error: BaseException) -> list[FrameType]:
    """Return the frames that the exception came through, the deepest last."""
    return [frame for frame, _ in traceback.walk_tb(error.__traceback__)]


def raised_at(error: BaseException) -> str:
    """Return `file:line in function` of the user's deepest frame; empty if there is none."""
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if not _FOREIGN.search(frame.filename)]
    return f"{shown(own[-1].filename)}:{own[-1].lineno} in {own[-1].name}" if own else ""


def passed_through(error: BaseException, *functions: str) -> bool:
    """Whether the exception came out of a function of one of these names, at any depth."""
    return any(frame.f_code.co_name in functions for frame in frames_of(error))


def chain(error: BaseException | None) -> list[BaseException]:
    """Return an exception and all its causes, the last one first."""
    found: list[BaseException] = []
    while error is not None and error not in found:
        found.append(error)
        error = error.__cause__ or error.__context__
    return found


def argument_problems(error: ArgumentsError, origin: Origins) -> Iterator[Problem]:
    """Yield a problem for each entry of an `ArgumentsError`."""
    for problem in error.problems:
        yield Problem(_code(problem), str(problem), _origin(problem, origin))


def _code(problem: ArgumentProblem) -> str:
    if not problem.field:
        return "T004" if problem.origin.startswith("file") else "T002"
    if _UNKNOWN.match(problem.message):
        return "T001"
    is_pair = bool(problem.others) or (problem.value is NOTHING and not problem.field.startswith("-"))
    return "T003" if is_pair else "T002"


def _origin(problem: ArgumentProblem, origin: Origins) -> str:
    if not problem.field:
        return problem.origin.removeprefix("file ")
    named = [(problem.field, problem.origin), *((name, source) for name, _, source in problem.others)]
    return ", ".join(dict.fromkeys(origin.locate(name, source) for name, source in named if source != "default"))
