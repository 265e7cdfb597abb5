"""Read which rows a job used in which step, over all its starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_starts(out: Path, rank: int | None = None) -> list[list[dict[str, Any]]]:
    """Return what ranks wrote, a list for each start of each rank (or of one), in the order of their beginnings.

    A last line that a kill cut short is left out.
    """
    pattern = "used-*.jsonl" if rank is None else f"used-*-{rank}.jsonl"
    starts = []
    for path in sorted(out.glob(pattern)):
        lines = path.read_text().split("\n")[:-1]
        starts.append([json.loads(line) for line in lines])
    return starts


def rows_of_steps(out: Path) -> dict[int, list[int]]:
    """Return the rows that count for each step, over all ranks, ascending.

    A start that goes on from step n takes back what earlier ones did after it.
    """
    used: dict[int, list[int]] = {}
    began = -1
    for start in _by_meeting(read_starts(out)):
        began = start[0][0]["begin"]
        used = {step: rows for step, rows in used.items() if step <= began}
        for rank in start:
            for each in rank:
                if "step" in each:
                    used.setdefault(each["step"], []).extend(each["rows"])
    return {step: sorted(rows) for step, rows in sorted(used.items())}


def _by_meeting(starts: list[list[dict[str, Any]]]) -> list[list[list[dict[str, Any]]]]:
    """Put together the ranks that met: so many that follow each other as their number of ranks says."""
    met: list[list[list[dict[str, Any]]]] = []
    for start in (start for start in starts if start):
        if met and start[0]["meeting"] == met[-1][0][0]["meeting"]:
            met[-1].append(start)
        else:
            met.append([start])
    return met
