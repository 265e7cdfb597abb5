"""Cut the power at every point of a run: whatever was promised is on every disk that may be left."""

from __future__ import annotations

import os
import pickle
import random
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from children import End, in_child
from crash_disk import Disk, Tree
from crash_kills import copied, go_on, going_back, run_until, training
from crash_operations import LOCK, Event, Recorder
from crash_session import Session, newest
from crash_training import COMPLETE, train, watch
from disk import Breaker, every_operation
from runner import WRONG_END, Case, Tally

from tr_ckpt.testing import CHANGES

# So many points are one fault's work; and of so many different disks one is trained on from, to the end.
CHUNK = 20
TRAINED = 50


@dataclass(frozen=True)
class Recording:
    """What was done to a disk, in order.

    Attributes:
        name: what the run was.
        root: absolute path of the recorded disk's root.
        run: path of the run's folder below it.
        base: what was on the disk before, for good.
        events: what was done.
        asynchronous: how the run saved.
        promised: the step that was safe before.
    """

    name: str
    root: Path
    run: str
    base: Path
    events: list[Event]
    asynchronous: bool = False
    promised: int = 0


def recorded(root: Path, run: Path, breaker: Breaker | None = None, **options: Any) -> tuple[list[Event], End]:
    """Train in a process of its own and return what it did to the disk, also if `breaker` killed it."""
    kept = root.parent / "events.pickle"
    kept.unlink(missing_ok=True)

    def work() -> str:
        recorder = Recorder(root, breaker)

        def keep() -> None:
            kept.write_bytes(pickle.dumps(recorder.events))

        recorder.dying = keep
        watch(lambda place, step: recorder.promise(step) if place == COMPLETE else None)
        with every_operation(recorder):
            end = train(run, **options)
        keep()
        return end

    outcome = in_child(work)
    return pickle.loads(kept.read_bytes()) if kept.exists() else [], outcome


def record(root: Path, name: str, *, base: Path | None = None, asynchronous: bool = False, **options: Any) -> Recording:
    """Record a run that goes on from the folder `base`, or begins."""
    disk, before = root / "disk", root / "before"
    (disk / "a").mkdir(parents=True)
    run = disk / "a" / "run"
    if base is not None:
        copied(base, run)
        options = {**going_back(run), **options} if options.pop("goes_back", False) else options
    shutil.copytree(disk, before)
    events, outcome = recorded(disk, run, asynchronous=asynchronous, **options)
    if outcome.answer is None:
        raise RuntimeError(f"the run to be recorded, {name}, {outcome}")
    return Recording(name, disk, "a/run", before, events, asynchronous, 0 if base is None else 6)


@dataclass
class Judge:
    """Puts disks where they can be restored from, and says what is wrong with them; each different disk once.

    Args:
        session: knows what is right.
        recording: what the disks come from.
        folder: an empty folder.
    """

    session: Session
    recording: Recording
    folder: Path
    tally: Tally = field(default_factory=Tally)

    def __post_init__(self) -> None:
        self._known: dict[int, tuple[int, str]] = {}
        self._contents: dict[bytes, Path] = {}
        self._chance = random.Random(len(self.recording.events))

    def judge(self, tree: Tree, promised: int) -> None:
        """Count a disk, and what is wrong with it."""
        self.tally.tried += 1
        key = hash(frozenset(tree.items()))
        if key not in self._known:
            self.tally.ends["different disks"] += 1
            self._known[key] = self._restore(tree)
            if self._chance.random() < 1 / TRAINED and not self._known[key][1]:
                self._train(tree)
        step, problem = self._known[key]
        if not problem and step < promised:
            problem = f"step {step} is restored, though {promised} was promised to be safe"
        if problem:
            self.tally.wrong(WRONG_END, f"{problem}, from {self._describe(tree)}")

    def _restore(self, tree: Tree) -> tuple[int, str]:
        place = self.folder / "linked"
        self._put(tree, place, linked=True)
        try:
            step, state, said = newest(place / self.recording.run)
        except Exception as error:
            return 0, f"a restore ends with {type(error).__name__}: {error}"
        finally:
            shutil.rmtree(place)
        if said:
            return step, f"a restore says: {'; '.join(said)}"
        if step and state != self.session.alone[False].states[step]:
            return step, f"what is restored of step {step} is not what was saved"
        return step, ""

    def _train(self, tree: Tree) -> None:
        place = self.folder / "copied"
        self._put(tree, place, linked=False)
        self.tally.ends["trained on to the end"] += 1
        problem = go_on(self.session, place / self.recording.run, asynchronous=self.recording.asynchronous)
        if problem:
            self.tally.wrong(WRONG_END, f"{problem}, from {self._describe(tree)}")
        shutil.rmtree(place)

    def _put(self, tree: Tree, place: Path, *, linked: bool) -> None:
        place.mkdir()
        for path, content in tree.items():
            if content is None:
                (place / path).mkdir()
            elif not linked:
                (place / path).write_bytes(content)
            else:
                if content not in self._contents:
                    self._contents[content] = self.folder / f"content-{len(self._contents)}"
                    self._contents[content].write_bytes(content)
                os.link(self._contents[content], place / path)

    def _describe(self, tree: Tree) -> str:
        shown = sorted(path.removeprefix(f"{self.recording.run}/") for path, content in tree.items() if content is None)
        return f"a disk with the folders {shown}"


def cut(session: Session, recording: Recording, points: range, folder: Path) -> Tally:
    """Cut the power before each of these events of a recording, 0 being before the first."""
    disk = Disk.of(recording.base)
    disk.root = recording.root
    judge, promised = Judge(session, recording, folder), recording.promised
    for number, event in enumerate([*recording.events, None]):
        if number in points:
            before = len(judge.tally.problems)
            for tree in disk.possible(number):
                judge.judge(tree, promised)
            if event is not None and len(judge.tally.problems) > before:
                fresh = judge.tally.problems[before:]
                judge.tally.problems[before:] = [
                    (kind, f"before {event.kind}, the {number}. event: {text}") for kind, text in fresh
                ]
        if event is None or number >= points.stop:
            break
        if event.kind == "promise":
            promised = max(promised, event.step)
        disk.do(event)
    return judge.tally


def chunks(session: Session, recording: Recording, last: int | None = None) -> Iterator[Case]:
    """Yield cuts at all points of a recording, up to the event `last`."""
    end = len(recording.events) if last is None else last
    for start in range(0, end + 1, CHUNK):
        points = range(start, min(start + CHUNK, end + 1))
        yield Case(f"power cut in {recording.name}", partial(cut, session, recording, points))


def recordings(session: Session) -> list[Recording]:
    """Record the runs whose power is cut: from the beginning, in either way, and one that replaces a checkpoint."""
    base = run_until(session.root / "base-power", 7)
    return [
        record(session.root / "recorded", "a run"),
        record(session.root / "recorded-async", "a run that saves asynchronously", asynchronous=True),
        record(session.root / "recorded-back", "a run that saves a step again", base=base, goes_back=True),
    ]


def recoveries(session: Session) -> Iterator[Case]:
    """Yield cuts in what the next start clears up, after a run that was killed while it replaced a checkpoint."""
    base = run_until(session.root / "base-recovery", 7)
    whole = record(session.root / "recorded-replacing", "counted", base=base, goes_back=True)
    operations = [event for event in whole.events if event.kind in CHANGES]
    first = _renames(operations)[0]
    last = next(number for number, event in enumerate(operations, 1) if number > first and event.kind == "make_folder")
    for at in range(first, last + 1):
        yield Case(
            f"killed before operation {at}, {operations[at - 1].kind}, while step 6 was replaced, then power cut",
            partial(_recovery, session, base, at),
        )


def recovery(session: Session) -> list[Event]:
    """Return what a start does to the disk after a run that was killed when it had just replaced a checkpoint."""
    run = run_until(session.root / "base-sites", 7)
    events, _ = recorded(run.parent, run, **going_back(run))
    operations = [event for event in events if event.kind in CHANGES]
    again = run_until(session.root / "base-sites-killed", 7)
    training(again, Breaker(_renames(operations)[1] + 2), **going_back(again))  # that is after the folder was synced
    events, _ = recorded(again.parent, again)
    return events


def _renames(operations: list[Event]) -> list[int]:
    """Return the numbers, from 1, of the operations that rename a checkpoint."""
    return [n for n, event in enumerate(operations, 1) if event.kind == "rename" and LOCK not in event.path]


def _recovery(session: Session, base: Path, at: int, folder: Path) -> Tally:
    disk, before = folder / "disk", folder / "before"
    (disk / "a").mkdir(parents=True)
    run = copied(base, disk / "a" / "run")
    shutil.copytree(disk, before)
    events, first = recorded(disk, run, Breaker(at), **going_back(run))
    if not first.killed:
        return Tally.of(f"the fault did not strike: the run {first}")
    killed = len(events)
    more, second = recorded(disk, run)
    if second.answer != session.end:
        return Tally.of(f"the next run {second}")
    events += more
    # What is cleared away, and a little more, up to the folder of the next save.
    last = next(n for n, event in enumerate(events) if n >= killed and event.kind == "make_folder")
    recording = Recording("the recovery", disk, "a/run", before, events, promised=6)
    (folder / "cut").mkdir()
    return cut(session, recording, range(killed, last + 1), folder / "cut")
