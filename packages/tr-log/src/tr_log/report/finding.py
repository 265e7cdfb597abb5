"""Find the folders of runs below the paths that a command is given."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tr_log.events_file import EVENTS_FILE
from tr_log.report.run_folder import METRICS_FILE, RunFolder

DEPTH = 3
"""Levels of folders below a path that are searched."""


def find_runs(paths: Iterable[Path]) -> list[RunFolder]:
    """Return the runs in these folders: a folder that is a run itself, or the runs below it, oldest first.

    Raises:
        FileNotFoundError: a path does not exist, or holds no run.
    """
    found: list[RunFolder] = []
    for path in paths:
        if not path.is_dir():
            raise FileNotFoundError(f"{path} is not a folder; give the output_dir of a run, or a folder of several")
        folders = [path] if _is_run(path) else sorted(_runs_below(path, DEPTH))
        runs = [run for folder in folders if (run := _read(folder)) is not None]
        if not runs:
            raise FileNotFoundError(
                f"{path} holds no run: no {METRICS_FILE} and no {EVENTS_FILE} with an entry, in it or up to {DEPTH} "
                "levels below; give the output_dir of a run, or a folder of several"
            )
        found += sorted(runs, key=lambda run: run.news_s) if len(runs) > 1 else runs
    return found


def _is_run(folder: Path) -> bool:
    return (folder / METRICS_FILE).is_file() or (folder / EVENTS_FILE).is_file()


def _runs_below(folder: Path, depth: int) -> list[Path]:
    below: list[Path] = []
    for item in folder.iterdir():
        if item.is_dir() and not item.is_symlink() and not item.name.startswith((".", "checkpoint-")):
            below += [item] if _is_run(item) else _runs_below(item, depth - 1) if depth > 1 else []
    return below


def _read(folder: Path) -> RunFolder | None:
    try:
        return RunFolder.read(folder)
    except FileNotFoundError:  # files without an entry
        return None
