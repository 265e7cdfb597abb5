"""Look whether the output folder can be written to, without writing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tr_core.conditions.output_folder import obstacle
from tr_core.preflight.report import Problem
from tr_core.preflight.subject import Subject


def check_output_folder(subject: Subject) -> Iterator[Problem]:
    """Find a file in the way, and folders that this user may not write to."""
    if found := obstacle(Path(subject.args.output_dir).absolute()):
        yield Problem("T201", found, subject.origin("output_dir"))
