"""Take out one check at a time, in a copy of the source, and demand that the tests which it is for fail without it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from runner import HUNG, WRONG_END, Case, Options, Tally

ROOT = Path(__file__).parents[3]
LIMIT_S = 300  # of the tests of one mutation
QUICK = 3
_FAILED = 1  # pytest's exit code
_TOO_LONG = -1


@dataclass(frozen=True)
class Mutation:
    """A check that is taken out.

    Attributes:
        check: what is checked: `retry`, `digest`, `name`, `budget`, `sync`, `lock`...
        what: what is missing without it.
        path: the file, from the root of the repository.
        old: its text, which occurs once there.
        new: what comes in its place.
        tests: files of tests, at least one of which must fail.
        chosen: pytest's expression for those among them that are run; all if it is empty.
    """

    check: str
    what: str
    path: str
    old: str
    new: str
    tests: tuple[str, ...]
    chosen: str = ""

    def plant(self, source: Path) -> str:
        """Change the copy of the repository's packages in `source`; return what is wrong with this mutation, if so."""
        target = source / self.path
        text = target.read_text("utf-8")
        if text.count(self.old) != 1:
            return f"{self.path} holds {self.old!r} {text.count(self.old)} times; it must be there once"
        target.write_text(text.replace(self.old, self.new), "utf-8")
        return ""


def mutations() -> list[Mutation]:
    """Return those of `mutations.toml`."""
    listed = tomllib.loads(Path(__file__).with_name("mutations.toml").read_text("utf-8"))["mutation"]
    return [Mutation(**{**each, "tests": tuple(each["tests"])}) for each in listed]


def cases(options: Options) -> Iterator[Case]:
    """Yield the mutations, which some test must notice, and their tests without any, which must pass."""
    planted = mutations()[:: QUICK if options.quick else 1]
    for tests, expression in sorted({(each.tests, each.chosen) for each in planted}):
        yield Case(f"{' '.join(tests)} without any mutation", partial(_control, tests, expression), "checks taken out")
    for each in planted:
        yield Case(f"{each.check}: {each.what}", partial(_try, each), "checks taken out")


def _control(tests: tuple[str, ...], expression: str, folder: Path) -> Tally:
    code, said = _pytest(ROOT, tests, expression)
    return Tally.of("" if code == 0 else f"exit code {code}: {said}", 0)


def _try(mutation: Mutation, source: Path) -> Tally:
    for folder in sorted((ROOT / "packages").iterdir()):
        left_out = shutil.ignore_patterns("__pycache__")
        shutil.copytree(folder / "src", source / "packages" / folder.name / "src", ignore=left_out)
    if problem := mutation.plant(source):
        return Tally.of(problem)
    code, said = _pytest(source, mutation.tests, mutation.chosen)
    if code != _FAILED:
        how = HUNG if code == _TOO_LONG else WRONG_END
        return Tally.of(f"no test failed (exit code {code}): {said}", kind=how)
    return Tally(1, Counter({mutation.check: 1}))


def _pytest(source: Path, tests: tuple[str, ...], chosen: str) -> tuple[int, str]:
    """Run tests on the packages below `source`; returns pytest's exit code and the last line it printed."""
    paths = [str(source / "packages" / folder.name / "src") for folder in sorted((ROOT / "packages").iterdir())]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
    command += ["-k", chosen] if chosen else []
    try:
        ended = subprocess.run(
            command, cwd=ROOT, env=environment, timeout=LIMIT_S, capture_output=True, text=True, check=False
        )
    except subprocess.TimeoutExpired:
        return _TOO_LONG, f"the tests took more than {LIMIT_S} s"
    return ended.returncode, (ended.stdout.strip().splitlines() or [ended.stderr.strip()[-300:]])[-1]
