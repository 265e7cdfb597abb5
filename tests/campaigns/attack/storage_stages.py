"""The runs whose disk fails: what each does, what it is to end with, and how it is judged."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import crash_training
import failing_disk
import torch
from children import End, Gathered, in_ranks, note, noted, place_of
from crash_session import passed_over
from disk import Breaker, every_operation
from failing_disk import Aim
from runner import HUNG, LOST, OUTSIDE, WRONG_END, Tally

from tr_ckpt import Checkpointer
from tr_ckpt.testing import shorten_waits

STEPS, EVERY, KEPT = 8, 2, 2
SHORT_DELAYS_S = (0.002, 0.004, 0.006, 0.01, 0.02)  # between attempts to read, in the place of seconds
INTERRUPTED_AT = 7
LIMIT_S = 60.0  # of a run


class Interrupted(BaseException):
    """Ends a run at a step, to be resumed."""


@dataclass(frozen=True)
class Stage:
    """A run, on one or two ranks, new or resumed.

    Attributes:
        work: does the run in `folder` on one rank, to its end or to the beginning of step `until`; returns a digest.
        world_size: how many ranks.
        resumed: whether the disk fails in a run that goes on after an interrupted one.
        parts: names of what a checkpoint of it holds.
    """

    work: Callable[..., str]
    world_size: int
    resumed: bool
    parts: tuple[str, ...]
    options: dict[str, Any]


def train_alone(folder: Path, rank: int, gather: Gathered, until: int = 0, **options: Any) -> str:
    """Train with the Trainer; on two ranks with gloo."""
    if options.pop("world_size") > 1:
        os.environ.update(place_of(rank, 2, folder.parent / "meet"))
        options["per_device_train_batch_size"] = 2  # the same number of steps

    def watcher(place: str, step: int) -> None:
        if place in (crash_training.COMPLETE, crash_training.SAVED, "in the forward"):
            note(places=[*noted("places", ()), (place, step)])
        if place == crash_training.COMPLETE:
            note(complete=step)
        if place == "at a step's beginning" and until:
            note(begun=noted("begun", 0) + 1)
            if noted("begun", 0) == until:
                raise Interrupted

    crash_training.watch(watcher)
    trainer = crash_training.build(folder, save_total_limit=KEPT, **options)
    trainer.train(resume_from_checkpoint="auto")
    end = crash_training.digest_end(trainer)
    note(history=trainer.state.log_history)
    trainer.strategy.close()
    return end


class Numbers:
    """A part of a checkpoint: a few tensors."""

    def __init__(self, rank: int) -> None:
        self.values = {"one": torch.full((16,), 1.0 + rank), "two": torch.arange(6).reshape(2, 3).double()}

    def advance(self, step: int) -> None:
        for value in self.values.values():
            value.mul_(1.01).add_(step)

    def state_dict(self) -> dict[str, Any]:
        return {"values": self.values, "count": 3}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values = state["values"]


def loop_by_hand(folder: Path, rank: int, gather: Gathered, until: int = 0, **options: Any) -> str:
    """Use `Checkpointer` in a loop of one's own, which takes milliseconds."""
    world_size = options.pop("world_size")
    parts = {"model": Numbers(0), "rng": Numbers(rank)}
    more = {"rank": rank, "world_size": world_size, "gather_objects": gather if world_size > 1 else None}
    checkpointer = Checkpointer(folder, keep_last=KEPT, **more, **options)
    step = checkpointer.restore(parts) or 0
    while step < STEPS:
        step += 1
        if step == until:
            checkpointer.wait()
            raise Interrupted
        for part in parts.values():
            part.advance(step)
        if step % EVERY == 0:
            extra = {"write_extra": _write_extra, "on_commit": lambda path, step=step: note(complete=step)}
            checkpointer.save(step, parts, **extra)
        checkpointer.check()
    checkpointer.close()
    found = hashlib.sha256()
    for part in parts.values():
        for value in part.values.values():
            found.update(value.numpy().tobytes())
    # Every rank has a state of its own; what they share is the same.
    return found.hexdigest()


def _write_extra(folder: Path) -> None:
    (folder / "config.json").write_text("{}")


STAGES: dict[str, Stage] = {}
for _saves, _asynchronous in (("", False), (", asynchronous", True)):
    for _resumed in (False, True):
        _what = ("resumed" if _resumed else "new") + _saves
        _options = {"asynchronous": _asynchronous}
        STAGES[f"trainer, {_what}"] = Stage(train_alone, 1, _resumed, crash_training.PARTS, _options)
        STAGES[f"two ranks, {_what}"] = Stage(loop_by_hand, 2, _resumed, ("model", "rng"), _options)
        STAGES[f"trainers, {_what}"] = Stage(train_alone, 2, _resumed, crash_training.PARTS, _options)


class Attacked:
    """One stage with what it is to end with, measured in a folder of its own."""

    def __init__(self, stage: Stage, root: Path, *, of_files: bool = False) -> None:
        self.stage = stage
        self.root = root
        root.mkdir(parents=True)
        self.base: Path | None = None
        self.before = 0
        if stage.resumed:
            self.base = self._interrupted()
            self.before = newest(self.base, stage)[0]
        folder = self.fresh(root / "alone")
        ends = self.run(folder / "run", {rank: Aim(of_files=of_files) for rank in range(stage.world_size)})
        if any(end.answer is None for end in ends):
            raise RuntimeError(f"the run left alone: {'; '.join(map(str, ends))}")
        self.right = [end.answer for end in ends]
        self.calls = [end.noted["calls"] for end in ends]
        self.left = listed(folder / "run")

    def _interrupted(self) -> Path:
        folder = self.root / "base"
        folder.mkdir()
        ends = self.run(folder / "run", {}, until=INTERRUPTED_AT)
        if any("Interrupted" not in end.error for end in ends):
            raise RuntimeError(f"the run to be resumed: {'; '.join(map(str, ends))}")
        return folder / "run"

    def fresh(self, folder: Path) -> Path:
        """Return a folder, which is made if it is not there, with what the run goes on from."""
        folder.mkdir(exist_ok=True)
        if self.base is not None:
            shutil.copytree(self.base, folder / "run")
        return folder

    def run(
        self, run: Path, aims: dict[int, Aim], until: int = 0, prepare: Callable[[Path], None] | None = None
    ) -> list[End]:
        """Do the stage's run in the folder `run`, with the disk of some ranks failing as they are aimed.

        Args:
            run: the folder.
            aims: by rank.
            until: the step at whose beginning it is interrupted; 0 lets it end.
            prepare: called with the folder in each rank's process first.
        """

        def work(rank: int, gather: Gathered) -> str:
            shorten_waits(SHORT_DELAYS_S, 5.0)
            if prepare is not None:
                prepare(run)
            options = {"world_size": self.stage.world_size, "until": until, **self.stage.options}
            with aimed(run, aims[rank]) if rank in aims else nullcontext():
                return self.stage.work(run, rank, gather, **options)

        ends = in_ranks(work, self.stage.world_size, LIMIT_S)
        (run.parent / "meet").unlink(missing_ok=True)
        return ends

    def attack(self, folder: Path, rank: int, aim: Aim) -> Tally:
        """Let one rank's disk fail, and judge the end, what is left, and the end of the run that goes on."""
        run = self.fresh(folder) / "run"
        ends = self.run(run, {rank: aim})
        if ends[rank].noted.get("struck", 1) <= 0:
            return Tally(0, Counter({"did not strike": 1}))
        result = Tally(1)
        self.judge(result, folder, ends)
        result.problems = [(kind, f"at {ends[rank].noted.get('where')}: {text}") for kind, text in result.problems]
        if result.problems:  # left to be looked at
            (folder / "printed.txt").write_text("\n".join(f"{end}\n{end.output}" for end in ends))
        return result

    def judge(self, result: Tally, folder: Path, ends: list[End]) -> None:
        run = folder / "run"
        self._judge_end(result, folder, ends)
        complete = max([self.before, *(end.noted.get("complete", 0) for end in ends)])
        found, said = newest(run, self.stage)
        if found < complete:
            result.wrong(LOST, f"{complete} was complete, and {found} is what is left; {said}")
        if names := sorted({path.name for path in folder.iterdir()} - {"run"}):
            result.wrong(OUTSIDE, f"{names} were made beside the folder")
        again = self.run(run, {})
        if [end.answer for end in again] != self.right:
            result.wrong(WRONG_END, f"the next run: {'; '.join(map(str, again))}")
        elif not result.problems and (left := listed(run)) != self.left:
            self._judge_left(result, folder, left)

    def _judge_end(self, result: Tally, folder: Path, ends: list[End]) -> None:
        for number, end in enumerate(ends):
            if end.hung:
                result.wrong(HUNG, f"rank {number} did not end within {LIMIT_S} s")
            elif end.signal:
                result.wrong(WRONG_END, f"rank {number} {end}")
        if all(end.answer is not None for end in ends):
            result.ends["as if left alone"] += 1
            if [end.answer for end in ends] != self.right:
                result.wrong(WRONG_END, "it went on and ended otherwise")
        elif not result.problems:
            result.ends["in words"] += 1
            if not any(is_in_words(end, folder) for end in ends):
                result.wrong(WRONG_END, f"not in words: {'; '.join(map(str, ends))}")

    def _judge_left(self, result: Tally, folder: Path, left: list[str]) -> None:
        """Judge what is left where the last save had no other after it: more is right, if the next one clears it."""
        if missing := set(self.left) - set(left):
            result.wrong(LOST, f"the next run leaves {left}, without {sorted(missing)}")
        [end] = in_ranks(lambda rank, gather: _save_once_more(folder / "run", self.stage.parts), 1)
        after = listed(folder / "run")
        if end.answer is None or any(name.startswith(".") for name in after) or f"checkpoint-{STEPS}" not in after:
            result.wrong(WRONG_END, f"left are {left}, and after one more save ({end}) {after}")


@contextmanager
def aimed(run: Path, aim: Aim) -> Iterator[None]:
    """Let calls, or operations on files, be struck in the block, and note which were."""
    if aim.of_files:
        breaker = Breaker(aim.at, "error", aim.times, aim.error)
        with every_operation(breaker):
            try:
                yield
            finally:
                note(struck=breaker.struck, where=breaker.where.replace(str(run), "run"), calls=breaker.done)
        return
    if not failing_disk.is_here():  # where nothing can be compiled
        note(calls=[])
        yield
        return
    failing_disk.aim(run, aim)
    try:
        yield
    finally:
        number, where = failing_disk.struck()
        note(struck=number, where=where.replace(str(run), "run"))
        if not aim.at:
            note(calls=failing_disk.calls())


def _save_once_more(run: Path, parts: tuple[str, ...]) -> bool:
    checkpointer, states = Checkpointer(run, keep_last=KEPT), crash_training.held(parts)
    checkpointer.restore(states)
    checkpointer.save(STEPS + EVERY, states)
    return True


def is_in_words(end: End, folder: Path) -> bool:
    """Whether what a process ended with says what is wrong, and where."""
    kinds = set(end.error.split())
    names_it = str(folder) in end.text or "checkpoint-" in end.text
    return bool(kinds & {"OSError", "ValueError"}) and names_it  # a CheckpointError is a ValueError too


def listed(run: Path) -> list[str]:
    """Return the names of the folders that a run left, but for what it is the next save's business to clear."""
    return sorted(path.name for path in run.iterdir() if path.is_dir()) if run.is_dir() else []


def newest(run: Path, stage: Stage) -> tuple[int, list[str]]:
    """Return the step that a restore of all parts gives, 0 if none, and what it says."""
    with passed_over() as said:
        parts = crash_training.held(stage.parts)
        try:
            return Checkpointer(run).restore(parts) or 0, said
        except (OSError, ValueError) as error:
            return 0, [*said, f"{type(error).__name__}: {error}"]
