"""Try one change after another: put it into a copy of the package, and run the tests that reach it until one fails."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from mutants.changes import Change
from mutants.pytest_child import Watcher, end_all_of, start
from mutants.reach import Reach, sources_of
from packages import package

FIRST_S = 5.0  # the first stage: the cheapest tests, which catch most, without collecting the files of the others
SLACK_S = 20.0  # what a test may take beside some times its own time: machines are shared
SLOWER = 8.0


@dataclass
class Copy:
    """A copy of a package's source that one worker changes and puts right again."""

    name: str
    folder: Path

    def make(self) -> None:
        """Copy the package with its bytecode, which stays valid: the times of the files are copied with them."""
        shutil.rmtree(self.folder, ignore_errors=True)
        shutil.copytree(package(self.name).path / "src", self.folder)

    def write(self, path: str, text: str) -> None:
        """Give one file another text, and no bytecode."""
        target = self.folder / Path(path).relative_to(f"packages/{self.name}/src")
        for old in (target.parent / "__pycache__").glob(f"{target.stem}.*.pyc"):
            old.unlink()
        target.write_text(text, encoding="utf-8")


@dataclass
class Trial:
    """One change under way.

    Attributes:
        left: stages of tests not begun.
        now: the tests of the stage under way.
        was_repeated: whether a test that did not end was tried once more: machines stall, too.
    """

    change: Change
    name: str
    copy: Copy
    report: Path
    left: list[list[str]]
    child: int = 0
    deadline: float = 0.0
    begun: float = field(default_factory=time.monotonic)
    ran: int = 0
    now: list[str] = field(default_factory=list)
    was_repeated: bool = False


class Trials:
    """Try changes with several workers.

    Args:
        reaches: what is known of each package's tests.
        texts: the files as they are at the beginning; they may change while this runs, and the tests had better not.
        budget_s: how much of the tests' own time one change may take; the cheapest tests run first.
        done: is given each result.
    """

    def __init__(
        self,
        reaches: dict[str, Reach],
        texts: dict[str, str],
        folder: Path,
        workers: int,
        budget_s: float,
        done: Callable[[dict], None],
    ) -> None:
        self.reaches, self.texts, self.folder, self.budget_s, self.done = reaches, texts, folder, budget_s, done
        self.free = list(range(workers))
        self.copies = {(n, name): Copy(name, folder / f"copy-{n}" / name) for n in range(workers) for name in reaches}
        for copy in self.copies.values():
            copy.make()
        self.running: dict[int, tuple[int, Trial]] = {}
        self.catchers: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))

    def run(self, changes: Iterable[tuple[str, Change]]) -> None:
        """Try all; each comes with the name of its package."""
        for name, change in changes:
            while not self.free:
                self._wait()
            self._begin(self.free.pop(), name, change)
        while self.running:
            self._wait()

    def _begin(self, worker: int, name: str, change: Change) -> None:
        copy = self.copies[worker, name]
        copy.write(change.path, change.apply(self.texts[change.path]))
        report = self.folder / f"trial-{worker}.json"
        trial = Trial(change, name, copy, report, self._stages(name, change))
        self._next_stage(worker, trial)

    def _stages(self, name: str, change: Change) -> list[list[str]]:
        reach = self.reaches[name]
        caught = self.catchers[change.path]
        tests = sorted(reach.tests_of(change.path, change.lines, change.static), key=lambda test: -caught[test])
        first: list[str] = []
        rest: list[str] = []
        spent = 0.0
        paid: dict[str, float] = {}
        for test in tests:
            unpaid = sum(seconds for name, seconds in reach.shares[test].items() if name not in paid)
            cost = spent + unpaid + reach.own[test]
            # Where what it shares with others is there already, a test costs next to nothing.
            is_free = bool(reach.shares[test]) and not unpaid and reach.own[test] < 1.0
            if not first or (cost <= FIRST_S and not rest):
                first.append(test)
            elif cost <= self.budget_s or is_free:
                rest.append(test)
            else:
                continue
            spent = cost
            paid |= reach.shares[test]
        return [stage for stage in (first, rest) if stage]

    def _next_stage(self, worker: int, trial: Trial) -> None:
        if not trial.left:
            self._end(worker, trial, {"outcome": "survived" if trial.ran else "run by no test"})
            return
        tests = trial.now = trial.left.pop(0)
        seconds = self.reaches[trial.name].seconds
        limits = {test: SLACK_S + SLOWER * seconds[test] for test in tests}
        files = list(dict.fromkeys(test.partition("::")[0] for test in tests))
        trial.report.unlink(missing_ok=True)
        trial.ran += len(tests)
        trial.deadline = time.monotonic() + 60 + SLOWER * sum(seconds[test] for test in tests)
        source = [str(trial.copy.folder), *sources_of(trial.name)[1:]]
        trial.child = start(Watcher(trial.report, limits), files, source, ["-x"], {})
        self.running[trial.child] = (worker, trial)

    def _wait(self) -> None:
        time.sleep(0.02)
        for child, (worker, trial) in list(self.running.items()):
            if time.monotonic() > trial.deadline:
                end_all_of(child, trial.report)
            if os.waitpid(child, os.WNOHANG)[0]:
                end_all_of(child, trial.report)
                del self.running[child]
                self._judge(worker, trial)

    def _judge(self, worker: int, trial: Trial) -> None:
        found = json.loads(trial.report.read_text("utf-8")) if trial.report.exists() else {"running": "", "failed": ""}
        shutil.rmtree(trial.report.with_suffix(".tmp"), ignore_errors=True)
        if found["failed"]:
            self.catchers[trial.change.path][found["failed"]] += 1
            self._end(worker, trial, {"outcome": "caught", "test": found["failed"], "reason": found["reason"]})
        elif (found["running"] or not trial.report.exists()) and not trial.was_repeated:
            trial.was_repeated = True
            ended = set(found.get("tests", ())) - {found["running"]}
            trial.left.insert(0, [test for test in trial.now if test not in ended])
            self._next_stage(worker, trial)
        elif found["running"] or not trial.report.exists():
            # Hung or crashed, in a test or while pytest looked for tests.
            self._end(worker, trial, {"outcome": "no end", "test": found["running"]})
        elif not found["tests"]:
            self._end(worker, trial, {"outcome": "not judged: no test was found again"})
        else:
            self._next_stage(worker, trial)

    def _end(self, worker: int, trial: Trial, result: dict) -> None:
        change = trial.change
        text = self.texts[change.path]
        trial.copy.write(change.path, text)
        self.free.append(worker)
        result["seconds"] = round(time.monotonic() - trial.begun, 1)
        self.done({"key": change.key(text), "path": change.path, "line": change.line, "kind": change.kind,
                   "old": change.old, "new": change.new, "tests": trial.ran, **result})  # fmt: skip
