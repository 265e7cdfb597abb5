"""Look whether the output folder can be written to, without writing."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from tr_core.preflight.report import Problem
from tr_core.preflight.subject import Subject


def check_output_folder(subject: Subject) -> Iterator[Problem]:
    """Find a file in the way, and folders that this user may not write to."""
    folder = Path(subject.args.output_dir).absolute()
    existing = nearest_folder(folder)
    origin = subject.origin("output_dir")
    if not existing.is_dir():
        yield Problem("T201", f"output_dir={str(folder)!r} cannot be made: {existing} is a file", origin)
    elif not os.access(existing, os.W_OK | os.X_OK):
        yield Problem(
            "T201",
            f"output_dir={str(folder)!r} cannot be written to: this user may not write to {existing}; give another "
            "folder, or the right to write there",
            origin,
        )


def nearest_folder(folder: Path) -> Path:
    """Return the folder, or the nearest one above it that exists."""
    return next(path for path in (folder, *folder.parents) if os.path.lexists(path))
