"""Write the page of what was tested, `packages/tr-all/docs/tested.md`, at a release, from what nox printed.

    python tools/tested.py --where "Linux x86_64, 2 cores, torch 2.13.0+cpu" LOG ...

The scheduled workflow keeps what each session of a night printed; `nox -s nightly 2>&1 | tee LOG` prints the same here.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from machine import today

PAGE = Path(__file__).resolve().parent.parent / "packages/tr-all/docs/tested.md"
_BEGINS = re.compile(r"nox > Running session (?P<name>.+)")
_ENDS = re.compile(r"nox > Session (?P<name>.+?) (?P<end>was successful in (?P<time>.+)\.|failed|aborted|skipped: .*)")
_PYTEST = re.compile(r"^=*\s*((?:\d+ [a-z]+(?:, )?)+) in [\d.]+s.*$")
_HEAD = """# What was tested

Written at a release by `tools/tested.py`: the sessions of the last night before it (`nox -s nightly`), beside those of
every change (`nox -s tests`). The results are the counts of pytest, or the last line that a program printed. What each
backend and optimizer passed is in [matrix.md](matrix.md).

{date}, {where}.

| session | outcome | results | time |
|---|---|---|---|"""

Findings = dict[str, tuple[str, str, str]]


def findings_in(log: Iterable[str]) -> Findings:
    """Return of each session in what nox printed its outcome, the last line of each of its commands, and its time."""
    found: Findings = {}
    results: list[str] = []
    last = part = ""
    for line in log:
        if not line.startswith("nox > "):
            if line.strip() and (_PYTEST.match(line) or not _PYTEST.match(last)):  # libraries may warn at the exit
                last = line.strip()
            continue
        if last:  # the command before this line has ended
            results.append(_PYTEST.sub(r"\1", last)[:200])
            last = ""
        if match := _BEGINS.match(line):
            found[match["name"]] = ("failed", "it did not end", "")
        elif match := _ENDS.match(line):
            outcome = {"w": "passed", "s": "not run"}.get(match["end"][0], "failed")
            said = match["end"].partition(": ")[2] if outcome == "not run" else "; ".join(results)
            found.pop(match["name"], None)
            found[match["name"] + part] = (outcome, said, match["time"] or "")
            results, part = [], ""
        elif line.endswith(" -m slow"):
            part = ", slow tests"
    return found


def page(found: Mapping[str, tuple[str, str, str]], date: str, where: str) -> str:
    """Return the page: a row a session, in alphabetical order."""
    rows = [
        f"| `{name}` | {outcome if outcome != 'failed' else '**failed**'} | {results or '-'} | {time or '-'} |"
        for name, (outcome, results, time) in sorted(found.items())
    ]
    return "\n".join([_HEAD.format(date=date, where=where), *rows, ""])


def main(words: Sequence[str] | None = None) -> None:
    """Write the page from logs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("log", nargs="+", type=Path, help="what nox printed, of one session or several")
    parser.add_argument("--where", required=True, help="machine, system and torch, in words")
    parser.add_argument("--date", default=today(), help="day of the night (%(default)s)")
    options = parser.parse_args(words)
    found: Findings = {}
    for log in options.log:
        found |= findings_in(log.read_text(errors="replace").splitlines())
    PAGE.write_text(page(found, options.date, options.where))


if __name__ == "__main__":
    main()
