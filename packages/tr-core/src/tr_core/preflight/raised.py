"""Say of an exception what it is and where it came from, in one line each."""

from __future__ import annotations

import traceback
from pathlib import Path

from tr_core.preflight.origins import shown

# Frames of these are not where the user can change anything.
_OURS = ("tr_args", "tr_log", "tr_core", "tr_ckpt", "tr_optim", "tr_dist", "tr_all")
_NOT_THE_USERS = ("site-packages", "dist-packages", *_OURS)


def last_line(error: BaseException) -> str:
    """Return the last line of the traceback, whole: `ValueError: text`."""
    return "".join(traceback.format_exception_only(error)).strip()


def place(error: BaseException) -> str:
    """Return `file:line in function` of the deepest frame that is the user's own; empty if there is none."""
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
    """Return an exception and all that led to it, the last one first."""
    found: list[BaseException] = []
    while error is not None and error not in found:
        found.append(error)
        error = error.__cause__ or error.__context__
    return found


def _is_foreign(filename: str) -> bool:
    parts = Path(filename).parts
    return any(name in parts for name in _NOT_THE_USERS) or filename.startswith("<") or "lib/python" in filename
