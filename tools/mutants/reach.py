"""Know which tests run which lines of a package, and how long each takes.

What was seen is kept per file of tests, with the text of the sources at that time, and seen again when that file
changed. Lines that have moved since are found by comparing the texts.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import os
import shutil
import time
from collections import defaultdict
from functools import cache
from pathlib import Path

from mutants.pytest_child import Watcher, end_all_of, start
from packages import ROOT, package, with_siblings

LIMIT_S = 1200.0


def sources_of(name: str) -> list[str]:
    """Return the folders that hold the package and its siblings, itself first."""
    return [str(p.path / "src") for p in reversed(with_siblings(name))]


def digest(data: bytes) -> str:
    """Name a content."""
    return hashlib.sha256(data).hexdigest()[:16]


class Reach:
    """The tests of one package, and the lines that each runs."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.folder = folder / "reach" / name
        self.texts = self.folder / "texts"
        self.texts.mkdir(parents=True, exist_ok=True)
        self.seconds: dict[str, float] = {}  # with what it shares with others, each whole
        self.own: dict[str, float] = {}
        self.changed: set[str] = set()
        self.shares: dict[str, dict[str, float]] = {}
        self.lines: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))

    def test_files(self) -> list[Path]:
        """Return the package's files of tests."""
        return sorted((package(self.name).path / "tests").rglob("test_*.py"))

    def _cached(self, test_file: Path) -> Path:
        return self.folder / f"{test_file.stem}-{digest(test_file.read_bytes())}.json"

    def collect(self, workers: int) -> None:
        """Run each file of tests that changed, and write down which lines it runs."""
        todo = [path for path in self.test_files() if not self._cached(path).exists()]
        running: dict[int, tuple[Path, Path, float]] = {}
        while todo or running:
            while todo and len(running) < workers:
                path = todo.pop()
                work = self.folder / f"work-{path.stem}"
                shutil.rmtree(work, ignore_errors=True)
                work.mkdir()
                report = work / "report.json"
                tracing = str(Path(__file__).parent / "tracing")
                environment = {"MUTANTS_LINES": str(work), "MUTANTS_SOURCE": sources_of(self.name)[0] + "/"}
                watcher = Watcher(report)
                child = start(watcher, [str(path)], [tracing, *sources_of(self.name)], [], environment)
                running[child] = (path, work, time.monotonic() + LIMIT_S)
            self._gather(running, len(todo))
            time.sleep(0.05)

    def _gather(self, running: dict[int, tuple[Path, Path, float]], left: int) -> None:
        for child, (path, work, limit) in list(running.items()):
            if time.monotonic() > limit:
                end_all_of(child, work / "report.json")
            if os.waitpid(child, os.WNOHANG)[0]:
                end_all_of(child, work / "report.json")
                self._keep(path, work)
                del running[child]
                print(f"  {self.name}: {path.name}, {left + len(running)} files of tests left", flush=True)

    def _keep(self, test_file: Path, work: Path) -> None:
        prefix = str(ROOT) + "/"
        seen: dict[str, dict[str, set[int]]] = defaultdict(lambda: defaultdict(set))
        if (work / "lines.txt").exists():
            for row in (work / "lines.txt").read_text("utf-8", errors="replace").splitlines():
                test, _, rest = row.partition("\t")
                path, _, line = rest.partition("\t")
                if line.isdigit():
                    seen[test][path.removeprefix(prefix)].add(int(line))
        report = work / "report.json"
        found: dict = json.loads(report.read_text("utf-8")) if report.exists() else {"failed": "pytest itself"}
        tests: dict[str, dict] = found.get("tests", {})  # none, where a whole file needs what is not installed
        if found["failed"] and not tests:
            raise RuntimeError(f"{test_file.name} could not be run; {work / 'report.log'} says why")
        texts = {path: self._keep_text(path) for path in {path for lines in seen.values() for path in lines}}
        for test, entry in tests.items():
            for shared in entry["shares"]:  # what is set up for several tests is run for each of them
                for path, lines in seen[shared].items():
                    seen[test][path] |= lines
            entry["lines"] = {path: sorted(lines) for path, lines in seen[test].items()}
        for old in self.folder.glob(f"{test_file.stem}-*.json"):
            old.unlink()
        self._cached(test_file).write_text(json.dumps({**found, "texts": texts}), encoding="utf-8")
        shutil.rmtree(work, ignore_errors=True)

    def _keep_text(self, path: str) -> str:
        content = (ROOT / path).read_bytes()
        (self.texts / digest(content)).write_bytes(content)
        return digest(content)

    def control(self, tests: set[str]) -> set[str]:
        """Run tests as a fault's are run, but without one, and return those that fail: they would catch anything."""
        chosen = {test: 0.0 for test in sorted(tests & set(self.seconds), key=lambda test: (self.seconds[test], test))}
        report = self.folder / "control.json"
        report.unlink(missing_ok=True)
        paths = list(dict.fromkeys(test.partition("::")[0] for test in chosen))
        child = start(Watcher(report, chosen), paths, sources_of(self.name), [], {})
        os.waitpid(child, 0)
        end_all_of(child, report)
        ran = json.loads(report.read_text("utf-8"))["tests"]
        return {test for test in chosen if not ran.get(test, {}).get("passed")}

    def load(self, left_out: set[str]) -> None:
        """Read what was collected; tests that failed or were skipped are left out, and those that are named."""
        for test_file in self.test_files():
            cached = self._cached(test_file)
            if not cached.exists():
                continue
            kept = json.loads(cached.read_text("utf-8"))
            for test, entry in kept["tests"].items():
                if not entry["passed"] or test in left_out:
                    continue
                self.shares[test] = {name: kept["shared"][name] for name in entry.get("shares", ())}
                self.own[test] = entry["seconds"]
                self.seconds[test] = entry["seconds"] + sum(self.shares[test].values())
                for path, lines in entry["lines"].items():
                    if (ROOT / path).exists() and kept["texts"][path] != digest((ROOT / path).read_bytes()):
                        self.changed.add(path)
                    moved = self._moved(path, kept["texts"][path])
                    for line in lines:
                        if line in moved:
                            self.lines[path][moved[line]].add(test)

    @cache  # noqa: B019  one object a run
    def _moved(self, path: str, text: str) -> dict[int, int]:
        old = (self.texts / text).read_text("utf-8").splitlines()
        new = (ROOT / path).read_text("utf-8").splitlines() if (ROOT / path).exists() else []
        if old == new:
            return {line: line for line in range(1, len(old) + 1)}
        blocks = difflib.SequenceMatcher(None, old, new, autojunk=False).get_matching_blocks()
        return {block.a + n + 1: block.b + n + 1 for block in blocks for n in range(block.size)}

    def tests_of(self, path: str, lines: tuple[int, int], static: bool) -> list[str]:
        """Return the tests that run one of the lines; of what runs at import, those that run anything of the file.

        A file that defines constants and types alone is run by no test: then every test may depend on it.
        """
        covered = self.lines.get(path, {})
        wanted = covered if static else range(lines[0], lines[1] + 1)
        found = {test for line in wanted for test in covered.get(line, ())}
        if not found and path in self.changed:  # it was seen as another text
            found = {test for tests in covered.values() for test in tests}
        if static and not found:
            found = set(self.seconds)

        def cost(test: str) -> tuple[float, str]:
            names_it = Path(path).stem in Path(test.partition("::")[0]).stem
            return self.seconds[test] * (0.2 if names_it else 1.0), test

        return sorted(found, key=cost)
