"""Run jobs that are struck, some side by side, and judge what the first start left and what the next one made of it."""

from __future__ import annotations

import json
import shutil
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import runner
from rank_programs import TORCHRUN, TRAINER, End, Job, nursery
from runner import HUNG, LOST, OUTSIDE, WRONG_END, Problem, Tally
from sample_records import read_starts
from strikes import Strike

PROGRAM = Path(__file__).parent / "attacked_run.py"
LIMIT_S = 120
# Interpreters start in them, and torchrun alone takes half a minute.
LAUNCHED_LIMIT_S = 300
ROWS_A_RANK = 12
SHOWN_CHARACTERS = 1500
_OURS = ("run", "end.json", "process-", "struck", "strikes", "used-")


@dataclass(frozen=True)
class Case:
    """One attack on a training job.

    Attributes:
        group: the line of the table that it belongs to.
        start: `plain`, `ranks`, `notebook`, `launch` or `torchrun`: by what the job is started.
        strike: what happens to it.
        workers: processes that load data, for each rank.
        arguments: further training arguments.
        begins: `fresh`, or `resumed`: with the checkpoints of a run left alone for two steps.
    """

    group: str
    start: str
    strike: Strike
    workers: int = 0
    arguments: tuple[tuple[str, Any], ...] = ()
    begins: str = "fresh"

    @property
    def size(self) -> int:
        """Number of ranks."""
        return 1 if self.start == "plain" else 2

    def words(self) -> list[str]:
        """Return the program's options, but for the strike."""
        given = ["--workers", str(self.workers), "--rows", str(ROWS_A_RANK * self.size)]
        given += ["--plain"] if self.start in ("plain", "notebook") else []
        given += ["--notebook"] if self.start == "notebook" else []
        return [*given, "--arguments", json.dumps(dict(self.arguments))]

    def __str__(self) -> str:
        more = [f"{self.workers} workers"] if self.workers else []
        more += [f"{name}={value}" for name, value in self.arguments]
        more += [self.begins] if self.begins != "fresh" else []
        return ", ".join([self.start, str(self.strike), *more])


@dataclass
class Outcome:
    """What came of an attack.

    Attributes:
        case: what it was.
        word: how the first start ended.
        codes: its exit codes, of ranks or of the launcher.
        said: what it wrote.
        problems: what is wrong, each with its kind.
    """

    case: Any
    word: str = ""
    codes: list[int | None] = field(default_factory=list)
    said: str = ""
    problems: list[Problem] = field(default_factory=list)


class Workshop:
    """Starts jobs that are struck, and knows what jobs come to that are left alone.

    Args:
        root: an empty folder.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._alone: dict[int, dict[str, Any]] = {}
        for size in (1, 2):
            folder = self.root / f"alone-{size}"
            words = ["--rows", str(ROWS_A_RANK * size), *(["--plain"] if size == 1 else [])]
            ends = nursery(PROGRAM).run(size, [folder / "out", *words], folder / "job", LIMIT_S)
            if any(end.code for end in ends):
                raise RuntimeError(f"the run left alone ended with {[end.code for end in ends]}: {ends[0].said}")
            self._alone[size] = read_end(folder / "out")
            self._leave_beginning(size, words)

    def _leave_beginning(self, size: int, words: list[str]) -> None:
        """Keep a job that was stopped after its first save."""
        folder = self.root / f"begun-{size}"
        strike = Strike("forward", "signal:KILL", 3)
        words = [*words, "--strike", strike.words()]
        nursery(PROGRAM).run(size, [folder / "out", *words], folder / "job", LIMIT_S)
        for name in ("struck", "strikes"):
            (folder / "out" / name).unlink()

    def strike(self, case: Case, folder: Path) -> tuple[Path, Outcome]:
        """Start a job, have it struck, and return its folder and what is known then."""
        outcome = Outcome(case)
        out = folder / "place" / "out"
        if case.begins == "resumed":
            shutil.copytree(self.root / f"begun-{case.size}" / "out", out)
        ends, left = self._start(case, folder / "first", [out, *case.words(), "--strike", case.strike.words()])
        outcome.codes, outcome.said = [end.code for end in ends], ends[0].said
        if None in outcome.codes:
            outcome.problems.append((HUNG, f"ended with {outcome.codes}: {outcome.said[-SHOWN_CHARACTERS:]}"))
        if left:
            outcome.problems.append((HUNG, f"{len(left)} processes are left"))
        if not (out / "struck").exists():
            outcome.problems.append((WRONG_END, f"it did not strike: {outcome.said[-SHOWN_CHARACTERS:]}"))
        return out, outcome

    def resume(self, out: Path, outcome: Outcome) -> None:
        """Start the job again, and compare its end with that of one left alone."""
        case, place = outcome.case, out.parent
        first = read_starts(out, 0)
        before, saved = len(first), [each["saved"] for start in first for each in start if "saved" in each]
        if any(outcome.codes) or not (out / "end.json").exists():
            again = Case(case.group, "plain" if case.size == 1 else "ranks", case.strike, case.workers, case.arguments)
            ends, left = self._start(again, place.parent / "again", [out, *again.words()])
            codes = [end.code for end in ends]
            if any(codes):
                said = f"the next start ended with {codes}: {ends[0].said[-SHOWN_CHARACTERS:]}"
                outcome.problems.append((HUNG if None in codes else WRONG_END, said))
                return
            began = [start[0]["begin"] for start in read_starts(out, 0)[before:] if start]
            if saved and began and began[-1] < max(saved):  # a run that is complete does not begin
                outcome.problems.append((LOST, f"step {max(saved)} was saved, and the next began at {began}"))
            if left:
                outcome.problems.append((HUNG, f"{len(left)} processes are left of the next start"))
        self._compare(out, outcome)

    def _compare(self, out: Path, outcome: Outcome) -> None:
        alone, end = self._alone[outcome.case.size], read_end(out)
        for name in alone:
            if end[name] != alone[name]:
                outcome.problems.append((LOST, f"its {name} are not those of a run left alone: {end[name]}"))
        strange = [path.name for path in out.parent.iterdir() if path.name != "out"]
        strange += [path.name for path in out.iterdir() if not path.name.startswith(_OURS)]
        if strange:
            outcome.problems.append((OUTSIDE, f"wrote {strange}"))
        left = [path.name for path in (out / "run").iterdir() if path.name.startswith(".tmp")]
        if left:
            outcome.problems.append((WRONG_END, f"leaves {left}"))

    def _start(self, case: Case, folder: Path, words: list[object]) -> tuple[list[End], list[int]]:
        if case.start in ("plain", "ranks", "notebook"):
            interpreter = nursery(PROGRAM)
            ends = interpreter.run(2 if case.start == "ranks" else 1, words, folder, LIMIT_S)
            return ends, interpreter.left_over()
        launcher = [*TRAINER, "--nproc", "2"] if case.start == "launch" else [*TORCHRUN, "--nproc-per-node=2"]
        standalone = ["--standalone"] if case.start == "torchrun" else []
        with Job(folder) as job:
            job.start([*launcher, *standalone, PROGRAM, *words])
            # Ranks of a launcher that is killed save, and end then.
            return job.ends(LAUNCHED_LIMIT_S), job.left_over(60)


def in_mixed_order(found: dict[str, list[Case]], seed: int, every: dict[str, int]) -> dict[str, list[Case]]:
    """Return groups of cases, of some one in so many, with neighbours of unlike kinds: a part of them is a sample.

    Another seed gives another part.
    """
    ordered = {
        group: sorted(cases, key=lambda case: zlib.crc32(f"{seed} {case}".encode())) for group, cases in found.items()
    }
    return {group: cases[:: every.get(group, 1)] for group, cases in ordered.items()}


def cases_of(row: str, cases: Iterable[Any], attack: Callable[[Any, Path], Outcome]) -> Iterator[runner.Case]:
    """Yield attacks for a row of the table."""
    for case in cases:
        yield runner.Case(str(case), partial(_tallied, attack, case), row)


def _tallied(attack: Callable[[Any, Path], Outcome], case: Any, folder: Path) -> Tally:
    outcome = attack(case, folder)
    is_struck = outcome.word != "not struck"
    return Tally(1, Counter({outcome.word: 1}), outcome.problems) if is_struck else Tally()


def read_end(out: Path) -> dict[str, Any]:
    """Return what a run ended with."""
    return json.loads((out / "end.json").read_text())
