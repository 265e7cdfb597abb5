"""Output folders that are long, linked, full of others, on another device, replaced or removed while a run saves."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from children import in_ranks
from conditions_disk import is_in_words_of
from runner import HUNG, LOST, WRONG_END, Tally
from storage_stages import KEPT, LIMIT_S, STAGES, STEPS, Attacked, Numbers, crash_training, is_in_words, newest

from tr_ckpt import Checkpointer

ENTRIES, CHECKPOINTS = 10_000, 300


def places(root: Path, quick: bool) -> Tally:
    """Count runs in places of every kind."""
    tally = Tally()
    course = Attacked(STAGES["trainer, new"], root / "trainer")
    made: dict[str, Callable[[Path], Path]] = {
        "a link to a folder": _linked,
        "a link to a folder on another device": _on_another_device,
        "below a link": lambda folder: _linked(folder) / "below",
        "many folders deep": lambda folder: folder.joinpath(*["deep"] * 100, "run"),
        "a long name": lambda folder: folder / ("n" * 255),
        "not UTF-8": lambda folder: folder / os.fsdecode(b"caf\xe9"),
        "line breaks and blanks": lambda folder: folder / " a\nb\tc ",
        "an escape sequence": lambda folder: folder / "a\x1b[31mb",
        "an @": lambda folder: folder / ".tmp-writing-checkpoint-1@host@1@12",
    }
    for what, make in made.items():
        folder = root / str(tally.tried)
        _ends_as_alone(tally, course, what, folder, make, refuses=what == "not UTF-8")
        if "another device" in what:
            shutil.rmtree(os.path.realpath(folder / "link"), ignore_errors=True)
    for length in (3800, 3950, 4050, 4095, 5000):
        _ends_as_alone(tally, course, f"{length} characters", root / str(tally.tried), _of_length(length), refuses=True)
    for mask in (0o077, 0o177, 0o777, 0o000):
        folder = root / str(tally.tried)
        _ends_as_alone(tally, course, f"umask {mask:o}", folder, lambda folder: folder / "run", mask=mask)
    return tally


def _ends_as_alone(
    tally: Tally, course: Attacked, what: str, folder: Path, make: Callable[[Path], Path], *, refuses: bool = False,
    mask: int = 0o022,
) -> None:  # fmt: skip
    tally.tried += 1
    folder.mkdir()

    def work(rank: int, gather: Any) -> str:
        os.umask(mask)
        run = make(folder)
        try:
            first = course.stage.work(run, 0, gather, world_size=1)
        except Exception as error:
            if refuses and (is_in_words_of(error, run) or "too long" in str(error) or "UTF-8" in str(error)):
                return "in words"
            raise
        again = course.stage.work(run, 0, gather, world_size=1)
        assert [first] == [again] == course.right, (first, again)
        assert newest(run, course.stage)[0] == STEPS
        return "as if left alone"

    [end] = in_ranks(work, 1, LIMIT_S)
    if end.answer is None:
        tally.wrong(HUNG if end.hung else WRONG_END, f"{what}: {end}\n{end.output[-1500:]}")
        return
    tally.ends[end.answer] += 1


def _linked(folder: Path) -> Path:
    (folder / "elsewhere").mkdir(exist_ok=True)
    if not (folder / "link").is_symlink():
        (folder / "link").symlink_to(folder / "elsewhere")
    return folder / "link"


def _on_another_device(folder: Path) -> Path:
    if not (folder / "link").is_symlink():
        other = tempfile.mkdtemp(dir="/var/tmp" if str(folder).startswith("/dev/shm") else "/dev/shm")
        (folder / "link").symlink_to(other)
    return folder / "link"


def _of_length(length: int) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        while len(str(folder)) + 202 < length:
            folder = folder / ("d" * 200)
        return folder / ("e" * max(1, length - len(str(folder)) - 1))

    return make


def changed_meanwhile(root: Path, quick: bool) -> Tally:
    """Count runs whose folder is removed, moved or replaced while they train."""
    tally = Tally()
    changes: dict[str, Callable[[Path], None]] = {
        "removed": shutil.rmtree,
        "moved away": lambda run: run.rename(run.with_name("moved")),
        "replaced by an empty one": _replaced,
        "replaced by a copy": _by_a_copy,
        "replaced by a file": _by_a_file,
        "replaced by a link": _by_a_link,
    }
    for name in ("trainer, new", "trainer, new, asynchronous"):
        course = Attacked(STAGES[name], root / name.replace(", ", "-"))
        for what, change in changes.items():
            for at in (3, 5, 8)[:: 2 if quick else 1]:
                _changed(tally, course, f"{name}, {what} at step {at}", change, at)
    return tally


def _changed(tally: Tally, course: Attacked, label: str, change: Callable[[Path], None], at: int) -> None:
    tally.tried += 1
    folder = course.fresh(course.root / str(tally.tried))
    run = folder / "run"

    def prepare(_: Path) -> None:
        reached = [0]

        def step(*arguments: Any, really: Any = crash_training.reach) -> None:
            if arguments[0] == "at a step's beginning":
                reached[0] += 1
                if reached[0] == at and run.exists():
                    change(run)
            really(*arguments)

        crash_training.reach = step

    [end] = course.run(run, {}, prepare=prepare)
    if end.hung or end.signal or (end.answer is None and not is_in_words(end, run)):
        tally.wrong(HUNG if end.hung else WRONG_END, f"{label}: {end}")
        return
    if end.answer is not None and [end.answer] != course.right:
        tally.wrong(WRONG_END, f"{label}: it ended otherwise")
    tally.ends["as if left alone" if end.answer else "in words"] += 1
    if run.is_file():
        run.unlink()
    [again] = course.run(run, {})
    if [again.answer] != course.right:
        tally.wrong(WRONG_END, f"{label}: the next run {again}")
    if end.answer is not None and newest(run, course.stage)[0] != STEPS:
        tally.wrong(LOST, f"{label}: the run ended well, and {newest(run, course.stage)} is what is left")


def _replaced(run: Path) -> None:
    run.rename(run.with_name("moved"))
    run.mkdir()


def _by_a_copy(run: Path) -> None:
    run.rename(run.with_name("moved"))
    shutil.copytree(run.with_name("moved"), run)


def _by_a_file(run: Path) -> None:
    run.rename(run.with_name("moved"))
    run.write_text("a file")


def _by_a_link(run: Path) -> None:
    run.rename(run.with_name("moved"))
    run.symlink_to(run.with_name("moved"))


def crowded(root: Path, quick: bool) -> Tally:
    """Count what is done in a folder with very many entries."""
    tally = Tally()
    run = root / "run"

    def fill(rank: int, gather: Any) -> int:
        checkpointer, part = Checkpointer(run), Numbers(0)
        for step in range(1, (CHECKPOINTS // 10 if quick else CHECKPOINTS) + 1):
            part.advance(step)
            checkpointer.save(step, {"model": part})
        for number in range(ENTRIES):
            names = (f"x-{number}", f"checkpoint-0{number}", f".tmp-x-{number}", f"checkpoint-{number}.old")
            (run / names[number % 4]).write_text("")
        return step

    def save(rank: int, gather: Any) -> int:
        checkpointer, part = Checkpointer(run, keep_last=KEPT), Numbers(0)
        step = checkpointer.restore({"model": part})
        assert step == checkpointer.steps()[-1]
        for _ in range(3):
            step += 1
            checkpointer.save(step, {"model": part})
        return len(checkpointer.steps())

    for what, work in (("filled", fill), ("restored, saved and cleared", save)):
        tally.tried += 1
        began = time.monotonic()
        [end] = in_ranks(work, 1, 2 * LIMIT_S)
        if end.answer is None:
            tally.wrong(HUNG if end.hung else WRONG_END, f"not {what}: {end}")
        elif time.monotonic() - began > LIMIT_S:
            tally.wrong(HUNG, f"{what} took {time.monotonic() - began:.0f} s")
        elif what != "filled" and (end.answer != KEPT or len(os.listdir(run)) != ENTRIES + KEPT):
            tally.wrong(WRONG_END, f"{what}: {end.answer} checkpoints among {len(os.listdir(run))} entries")
        tally.ends[what] += end.answer is not None
    return tally
