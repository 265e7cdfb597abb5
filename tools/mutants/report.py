"""Print what became of the changes: a table by file, and every survivor."""

from __future__ import annotations

import re
from collections import defaultdict

CAUGHT = ("caught", "no end")


def short(text: str, length: int = 110) -> str:
    """Put a piece of code on one line."""
    text = re.sub(r"\s+", " ", text)
    return text if len(text) <= length else text[: length - 1] + "…"


def described(result: dict) -> str:
    """Say what was changed, and where."""
    return f"{result['path']}:{result['line']}: {result['kind']}: {short(result['old'])} -> {short(result['new'])}"


def print_report(results: list[dict]) -> float:
    """Print the table and the survivors; return the part that was caught."""
    files: dict[str, list[dict]] = defaultdict(list)
    for result in results:
        files[result["path"]].append(result)
    print(f"\n{'file':72} {'faults':>6} {'caught':>6} {'no end':>6} {'survived':>8}")
    for path in sorted(files):
        outcomes = [result["outcome"] for result in files[path]]
        caught = sum(outcome in CAUGHT for outcome in outcomes)
        print(f"{path:72} {len(outcomes):6} {caught:6} {outcomes.count('no end'):6} {len(outcomes) - caught:8}")
    survivors = [result for result in results if result["outcome"] not in CAUGHT]
    print(f"\n{len(survivors)} survivors:")
    for result in sorted(survivors, key=lambda result: (result["path"], result["line"])):
        print(f"  {described(result)} [{result['outcome']}, {result['tests']} tests]")
    part = 1 - len(survivors) / len(results) if results else 0.0
    ended = sum(result["outcome"] == "no end" for result in results)
    print(
        f"\n{len(results)} faults, {len(results) - len(survivors)} caught ({part:.1%}), {ended} of them by their hang"
    )
    return part
