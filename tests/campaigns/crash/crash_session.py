"""What the run left alone ends with, and what is on a disk after another."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from children import End, in_child
from crash_training import COMPLETE, PARTS, SAVED, digest, held, train, watch
from disk import Breaker, every_operation

from tr_ckpt import Checkpointer

NEW_RUN = Path("a", "run")  # neither folder is there


@dataclass(frozen=True)
class Alone:
    """The run that nobody disturbed.

    Attributes:
        end: digest of its end.
        operations: names of its operations on files, in order.
        complete: for each checkpoint its step, and how many operations were done when it was complete.
        saved: the same for when the loop went on, which is later, or earlier if it saves asynchronously.
        places: the places that it reached, in order, each with the step of the last save.
        states: digest of what each checkpoint held, by step.
        folders: names of what it left.
    """

    end: str
    operations: list[str]
    complete: list[tuple[int, int]]
    saved: list[tuple[int, int]]
    places: list[tuple[str, int]]
    states: dict[int, str]
    folders: list[str]

    def step_at(self, operation: int) -> int:
        """Return the newest step that was complete before `operation`, counted from 1; 0 if none was."""
        return max((step for step, done in self.complete if done < operation), default=0)


def run_alone(folder: Path, **options: Any) -> End:
    """Train in a process of its own, undisturbed; the answer is what `Alone` holds."""

    def work() -> dict[str, Any]:
        breaker, complete, saved, places, states = Breaker(), [], [], [], {}

        def watcher(place: str, step: int) -> None:
            places.append((place, saved[-1][0] if saved else 0))
            if place == COMPLETE:
                complete.append((step, len(breaker.done)))
            if place == SAVED:
                saved.append((step, len(breaker.done)))
                if not options.get("asynchronous"):  # it may not be written yet
                    states[step] = newest(folder)[1]

        watch(watcher)
        with every_operation(breaker):
            end = train(folder, **options)
        folders = sorted(path.name for path in folder.iterdir() if path.is_dir())
        found = Alone(end, breaker.done, complete, saved, places, states, folders)
        return {**vars(found), "states": list(states.items())}  # whose keys are numbers, which JSON has not

    return in_child(work)


def as_alone(outcome: End) -> Alone:
    """Return what `run_alone` found.

    Raises:
        RuntimeError: the undisturbed run did not end.
    """
    if outcome.answer is None:
        raise RuntimeError(f"the run left alone did not end: {outcome}")
    return Alone(**{**outcome.answer, "states": dict(outcome.answer["states"])})


def newest(folder: Path) -> tuple[int, str, list[str]]:
    """Return the step that a restore gives (0 if none), a digest of all parts, and what it skipped."""
    parts = held(PARTS)
    with passed_over() as said:
        step = Checkpointer(folder).restore(parts)
    return step or 0, digest({name: part.state for name, part in parts.items()}), said


@contextmanager
def passed_over() -> Iterator[list[str]]:
    """Collect what tr_ckpt says of damaged checkpoints, and keep it off the screen."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logger = logging.getLogger("tr_ckpt")
    before = logger.propagate, logger.level, logger.handlers
    logger.propagate, logger.handlers = False, [handler]
    logger.setLevel(logging.WARNING)  # the run's arguments may have made it more silent
    try:
        yield said
    finally:
        logger.propagate, level, logger.handlers = before
        logger.setLevel(level)


@dataclass
class Session:
    """One session: where it works, how much of it is done, and what is right.

    Attributes:
        root: an empty folder.
        quick: whether to do a part only.
        options: training arguments of the run, beside those of `crash_training.build`.
        alone: the undisturbed run, by whether it saves asynchronously.
    """

    root: Path
    quick: bool
    options: dict[str, Any] = field(default_factory=dict)
    alone: dict[bool, Alone] = field(default_factory=dict)

    @property
    def end(self) -> str:
        return self.alone[False].end

    def prepare(self) -> list[str]:
        """Let the run alone, with either way of saving; returns what is wrong before any fault."""
        for asynchronous in (False, True):
            # As deep as the runs of cases are: what is synced above it counts as operations too.
            folder = self.root / f"alone-{asynchronous}" / "0"
            folder.mkdir(parents=True)  # a killed run makes those of `NEW_RUN` and no more: each is an operation
            self.alone[asynchronous] = as_alone(run_alone(folder / NEW_RUN, asynchronous=asynchronous, **self.options))
        one, other = self.alone[False], self.alone[True]
        wrong = []
        if one.end != other.end:
            wrong.append("the run that saves asynchronously ends with another digest")
        if one.folders != other.folders:
            wrong.append(f"left alone, the runs leave {one.folders} and {other.folders}")
        return wrong
