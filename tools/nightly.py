"""Run sessions of the noxfile one after another, and note in `packages/tr-all/docs/tested.md` what each of them found.

A session that fails does not keep the next ones from running. Each is noted when it ends, with its date and machine,
so a run that is stopped keeps what it has, and one session can be repeated alone: `nox -s nightly -- parity`. What
they print is in `build/nightly/`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from machine import hardware, today
from requirements import BACKENDS

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "packages" / "tr-all" / "docs"
LOGS = ROOT / "build" / "nightly"
LIMIT_S = 4 * 3600
TIMED_OUT = 124  # as `timeout` says it
# `slow/integration` runs what is marked slow in the session `integration`.
SLOW = "slow/"
SESSIONS = (
    *(f"{SLOW}{name}" for name in ("integration", "alone(package='tr-dist')", "alone(package='tr-optim')")),
    "crash", "resume", "fuzz", "parity", *(f"backend({name})" for name in BACKENDS), "robustness", "launching",
    "examples", "ecosystem", "llama_factory", "docs", "report", "release", "trackers", "engines", "kernels", "attack",
    "minimums", "pythons-3.12", "pythons-3.13",
)  # fmt: skip

_BEGINS = re.compile(r"nox > Running session (?P<name>.+)")
_ENDS = re.compile(r"nox > Session (?P<name>.+?) (?P<end>was successful|failed|aborted|skipped)(: (?P<why>.*))?")
_OUTCOMES = {"was successful": "passed", "failed": "failed", "aborted": "failed", "skipped": "not run"}
_PYTEST = re.compile(r"^=*\s*((?:\d+ [a-z]+(?:, )?)+) in [\d.]+s.*$")


@dataclass(frozen=True)
class Finding:
    """What one session found.

    Attributes:
        session: its name, as `nox -l` prints it.
        outcome: "passed" if all its commands succeeded, "failed", or "not run" if nox skipped it.
        results: the last line that each command printed, of pytest the counts; or why it failed or was skipped.
        seconds: how long it ran, with the others that it started, the making of environments included.
        date: the day, as YYYY-MM-DD.
        machine: cores, memory, accelerator.
        versions: of Python and torch.
    """

    session: str
    outcome: str
    results: tuple[str, ...]
    seconds: float
    date: str
    machine: str
    versions: str


def findings_in(log: Sequence[str]) -> dict[str, tuple[str, tuple[str, ...]]]:
    """Return of each session in what nox printed its outcome, and the last line of each of its commands."""
    found: dict[str, tuple[str, tuple[str, ...]]] = {}
    results: list[str] = []
    last = ""
    for line in log:
        if not line.startswith("nox > "):
            if line.strip() and (_PYTEST.match(line) or not _PYTEST.match(last)):  # libraries may warn at the exit
                last = line.strip()
            continue
        if last:  # the command before this line has ended
            results.append(_shortened(last))
            last = ""
        if match := _BEGINS.match(line):
            results.clear()
            found[match["name"]] = ("failed", ("it did not end",))
        elif match := _ENDS.match(line):
            why = (match["why"],) if match["why"] else ()
            found[match["name"]] = (_OUTCOMES[match["end"]], (*results, *why))
            results.clear()
    return found


def _shortened(line: str) -> str:
    match = _PYTEST.match(line)
    return match[1] if match else line[:200]


def run(session: str, limit_s: float = LIMIT_S) -> list[Finding]:
    """Run one session, write what it prints to `build/nightly/`, and return its findings and those it started.

    Args:
        session: name for `nox -s`, or `slow/NAME` for what is marked slow in a session.
        limit_s: seconds after which it is ended, and noted as failed.
    """
    name = session.removeprefix(SLOW)
    prefix, chosen = (SLOW, ("--", "-m", "slow")) if session.startswith(SLOW) else ("", ())
    command = [sys.executable, "-m", "nox", "-s", name, *chosen]
    LOGS.mkdir(parents=True, exist_ok=True)
    path = LOGS / f"{session.replace('/', '-')}.log"
    began_s = time.monotonic()
    with open(path, "w") as log:
        process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        code = _wait(process, limit_s)
    seconds = time.monotonic() - began_s
    found = findings_in(path.read_text(errors="replace").splitlines())
    if (code and all(outcome != "failed" for outcome, _ in found.values())) or not found:
        found[name] = ("failed", (f"exit code {code}; see {path.relative_to(ROOT)}",))
    return [
        Finding(prefix + each, outcome, results, seconds, today(), hardware(), _versions(each))
        for each, (outcome, results) in found.items()
    ]


def _wait(process: subprocess.Popen[bytes], limit_s: float) -> int:
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        process.wait()
        return TIMED_OUT


def _versions(session: str) -> str:
    """Return the versions of Python and torch in a session's environment, as far as it has them."""
    folder = ROOT / ".nox" / re.sub(r"[^\w.]+", "-", session).strip("-")
    asked = (
        "import platform\nfrom importlib.metadata import version\n"
        "try: torch = ', torch ' + version('torch')\nexcept ImportError: torch = ''\n"
        "print('Python ' + platform.python_version() + torch)"
    )
    python = folder / "bin" / "python"
    if not python.exists():
        return f"Python {platform.python_version()}"
    return subprocess.run([python, "-c", asked], capture_output=True, text=True, timeout=60).stdout.strip()


def noted(path: Path) -> dict[str, dict[str, Any]]:
    """Return what was noted of each session so far."""
    return json.loads(path.read_text()) if path.exists() else {}


def note(findings: Sequence[Finding], folder: Path = DOCS) -> None:
    """Write findings into `tested.json` and `tested.md` of a folder, in place of those of the same sessions."""
    path = folder / "tested.json"
    entries = noted(path)
    entries.update({finding.session: asdict(finding) for finding in findings})
    for target, text in ((path, json.dumps(entries, indent=1) + "\n"), (folder / "tested.md", page(entries))):
        unfinished = target.with_suffix(".new")
        unfinished.write_text(text)
        unfinished.replace(target)


def page(entries: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the page of what was tested: a row a session, in alphabetical order."""
    rows = [
        f"| `{name}` | {_WORDS[entry['outcome']]} | {'; '.join(entry['results']) or '-'} "
        f"| {_minutes(entry['seconds'])} | {entry['date']} | {entry['versions']} | {entry['machine']} |"
        for name, entry in sorted(entries.items())
    ]
    return "\n".join([_HEAD, *rows, ""])


_WORDS = {"passed": "passed", "failed": "**failed**", "not run": "not run"}
_HEAD = """# What was tested, where and when

Written by `nox -s nightly`, which runs these sessions of the noxfile; `nox -s nightly -- NAME` repeats one of them.
Each row is a session's last run as a whole. The results are the counts of pytest, or the last line that a program
printed. `slow/NAME` is what a session leaves to the night. What each backend and optimizer passed is in
[matrix.md](matrix.md).

| session | outcome | results | time | date | versions | machine |
|---|---|---|---|---|---|---|"""


def _minutes(seconds: float) -> str:
    whole = round(seconds)
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"


def main(words: Sequence[str] | None = None) -> int:
    """Run the sessions that are named and note their findings; return 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("session", nargs="*", default=SESSIONS, help="of the noxfile, or slow/NAME (all of a night)")
    parser.add_argument("--limit", type=float, default=LIMIT_S, metavar="S", help="seconds for each (%(default)s)")
    options = parser.parse_args(words)
    failed = []
    for number, session in enumerate(options.session, 1):
        print(f"{number} of {len(options.session)}  {session} ...", flush=True)
        findings = run(session, limit_s=options.limit)
        note(findings)
        for finding in findings:
            print(f"  {finding.outcome}  {finding.session}: {'; '.join(finding.results)}", flush=True)
        print(f"  {_minutes(findings[0].seconds)}", flush=True)
        failed.extend(finding.session for finding in findings if finding.outcome == "failed")
    print(f"sessions {len(options.session)}, failed {len(failed)}{': ' + ', '.join(failed) if failed else ''}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
