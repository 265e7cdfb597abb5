"""Make the table of several runs: what each came to, and the arguments in which they differ."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from tr_log import formatting
from tr_log.report.curves import words_of
from tr_log.report.run_folder import RunFolder
from tr_log.report.time_split import wall_time

Column = dict[str, Any]
"""Its `title`, `kind` (`result`, `argument`, `step`, `seconds`, `state`), and whether a `greater` result is better."""


def run_table(runs: Sequence[RunFolder]) -> tuple[list[Column], list[list[Any]]]:
    """Return the columns, and the values of each run; None where a run has none."""
    columns: list[tuple[Column, list[Any]]] = []
    bests = [run.best() for run in runs]
    for name, greater in dict.fromkeys(run.objective for run, best in zip(runs, bests, strict=True) if best):
        own = [best if best and best[0] == name else None for best in bests]
        title = f"best {words_of(name)[0].removeprefix('evaluation ')}"
        columns.append(({"title": title, "kind": "result", "greater": greater}, [best and best[1] for best in own]))
        columns.append(({"title": "at step", "kind": "step"}, [best and best[2] for best in own]))
    columns.append(({"title": "state", "kind": "state"}, [run.status for run in runs]))
    columns += _arguments(runs)
    results = [{"loss": run.newest("loss")} | run.results() for run in runs]
    for name in dict.fromkeys(name for found in results for name in found):
        values = [found.get(name) for found in results]
        if any(isinstance(value, int | float) for value in values):
            columns.append(({"title": words_of(name)[0], "kind": "result"}, formatting.to_strict(values)))
    walls = [round(wall_time(run.sessions), 3) if run.sessions else None for run in runs]
    columns.append(({"title": "steps", "kind": "step"}, [run.step for run in runs]))
    columns.append(({"title": "wall time", "kind": "seconds"}, walls))
    return [column for column, _ in columns], [list(row) for row in zip(*(c for _, c in columns), strict=True)]


def run_names(runs: Sequence[RunFolder]) -> list[str]:
    """Return the names of the folders; where two have one, the paths below the folder that all runs share."""
    names = [run.name for run in runs]
    return names if len(set(names)) == len(names) else _shortened([str(run.path.resolve()) for run in runs])


def _arguments(runs: Sequence[RunFolder]) -> list[tuple[Column, list[Any]]]:
    """Return the arguments that differ. The folder of a run is its name, and what equals an earlier one is left out."""
    made: dict[str, tuple[Column, list[Any]]] = {}
    for name in dict.fromkeys(name for run in runs for name in run.arguments):
        values = [run.arguments.get(name, "(not known)") for run in runs]
        known = [(run, run.arguments[name]) for run in runs if name in run.arguments]
        if len(set(map(repr, values))) == 1 or all(_is_own_folder(*pair) for pair in known):
            continue
        if all(isinstance(value, str) and os.path.isabs(value) for _, value in known):
            short = dict(zip((path for _, path in known), _shortened([path for _, path in known]), strict=True))
            values = [short.get(value, value) for value in values]
        shown = [v if isinstance(v, bool | int | float) else formatting.value(v) for v in values]
        made.setdefault(repr(shown), ({"title": name, "kind": "argument"}, formatting.to_strict(shown)))
    return list(made.values())


def _is_own_folder(run: RunFolder, value: Any) -> bool:
    return isinstance(value, str) and os.path.realpath(value) == str(run.path.resolve())


def _shortened(paths: Sequence[str]) -> list[str]:
    """Return absolute paths without the folder that they share."""
    try:
        shared = os.path.commonpath(paths)
    except ValueError:  # on several drives
        return list(paths)
    return [os.path.relpath(path, shared) for path in paths]
