"""Run pytest in a process forked from one that has imported torch, and see how it went."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import signal
import sys
import time
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from packages import ROOT

TRIAL = "MUTANTS_TRIAL"  # in the environment of all processes that a trial's tests start


@dataclass(eq=False)
class Watcher:
    """Choose the tests to run, in order, end those that hang, and write down how each went.

    Attributes:
        chosen: nodeid of each test to run and the seconds it may take, in order; all that are collected when empty.
    """

    report: Path
    chosen: Mapping[str, float] = field(default_factory=dict)
    failed: str = ""
    reason: str = ""
    tests: dict[str, dict] = field(default_factory=dict)
    uses: dict[str, list[str]] = field(default_factory=dict)
    shared: dict[str, float] = field(default_factory=dict)
    spent_on_shared: float = 0.0

    def pytest_collection_modifyitems(self, items: list) -> None:
        """Keep the chosen ones, in their order, those of a file together: it may set up what they share."""
        if self.chosen:
            order = {name: number for number, name in enumerate(self.chosen)}
            files: dict[str, int] = {}
            for name, number in order.items():
                files.setdefault(name.partition("::")[0], number)
            kept = [item for item in items if item.nodeid in order]
            items[:] = sorted(kept, key=lambda i: (files[i.nodeid.partition("::")[0]], order[i.nodeid]))
        for item in items:
            self.uses[item.nodeid] = list(item.fixturenames)

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Generator[None, object, object]:
        """Count what several tests share apart from the test that happens to come first."""
        if fixturedef.scope == "function":
            return (yield)
        name = f"{fixturedef.baseid}::{fixturedef.argname}"
        before, begun = os.environ.get("PYTEST_CURRENT_TEST", ""), time.perf_counter()
        os.environ["PYTEST_CURRENT_TEST"] = f"{name} (setup)"
        try:
            return (yield)
        finally:
            spent = time.perf_counter() - begun
            self.shared[name] = self.shared.get(name, 0.0) + spent
            self.spent_on_shared += spent
            os.environ["PYTEST_CURRENT_TEST"] = before

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Say what runs, and start the clock: what it does in C cannot keep the watchdog from ending it."""
        self.tests[nodeid] = {"seconds": time.perf_counter(), "passed": True}
        self.spent_on_shared = 0.0
        if limit := self.chosen.get(nodeid):
            self.write(running=nodeid)
            faulthandler.dump_traceback_later(limit, exit=True)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        """Stop the clock."""
        faulthandler.cancel_dump_traceback_later()
        spent = time.perf_counter() - self.tests[nodeid]["seconds"] - self.spent_on_shared
        places = [name for name in self.shared if nodeid.startswith(name.rpartition("::")[0])]
        shares = [name for name in places if name.rpartition("::")[2] in self.uses.get(nodeid, ())]
        self.tests[nodeid] |= {"seconds": round(spent, 3), "shares": shares}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Remember failures; a skipped test shows nothing."""
        if report.failed:
            self._fail(report.nodeid, report.longrepr)
        if not report.passed:
            self.tests[report.nodeid]["passed"] = False

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Remember files that cannot be collected."""
        if report.failed:
            self._fail(report.nodeid, report.longrepr)

    def _fail(self, nodeid: str, longrepr: object) -> None:
        crash = getattr(longrepr, "reprcrash", None)
        self.failed = self.failed or nodeid
        self.reason = self.reason or str(getattr(crash, "message", longrepr))[:200]

    def write(self, running: str = "") -> None:
        """Leave what is known to the process that waits."""
        verdict = {"failed": self.failed, "reason": self.reason, "running": running}
        verdict |= {"tests": self.tests, "shared": self.shared}
        self.report.write_text(json.dumps(verdict), encoding="utf-8")


def start(
    watcher: Watcher, paths: list[str], source: list[str], options: list[str], environment: dict[str, str]
) -> int:
    """Fork a process that runs pytest on `paths` with the folders `source` first on the path; return its id."""
    child = os.fork()
    if child:
        return child
    code = 70
    try:
        os.setsid()
        log = os.open(watcher.report.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        for descriptor in (1, 2):
            os.dup2(log, descriptor)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.chdir(ROOT)
        tools = str(ROOT / "tools")
        sys.path[:] = [*source, *(entry for entry in sys.path if entry not in ("", str(ROOT), tools))]
        os.environ.update(environment, PYTHONPATH=os.pathsep.join(source))
        os.environ[TRIAL] = str(watcher.report)
        if any("tracing" in folder for folder in source):
            import sitecustomize  # noqa: F401  the tracer, which a started process would import by itself
        base = watcher.report.with_suffix(".tmp")
        plain = ("-q", "-p", "no:cacheprovider", "-p", "no:xdist", f"--basetemp={base}")
        code = int(pytest.main([*plain, *options, *paths], plugins=[watcher]))
        if code == pytest.ExitCode.USAGE_ERROR and not watcher.failed:
            watcher.failed = watcher.reason = "what all tests import cannot be imported"
        watcher.write()
    finally:
        os._exit(code)


def end_all_of(child: int, trial: Path) -> None:
    """Kill every process that a trial's tests left: those of its session, and those started in one of their own."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    mark = f"{TRIAL}={trial}".encode()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if mark in (entry / "environ").read_bytes().split(b"\0"):
                    os.kill(int(entry.name), signal.SIGKILL)
            except OSError:
                continue  # gone, or not ours
