"""Quotas, disks that are full for a while, small and slow disks."""

from __future__ import annotations

import ctypes
import math
import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import failing_disk
from children import in_ranks, noted
from failing_disk import FOR_GOOD, QUOTA, WAIT, Aim
from runner import HUNG, LOST, WRONG_END, Tally
from storage_stages import LIMIT_S, STAGES, Attacked, Numbers, crash_training, newest

from tr_ckpt import Checkpointer

_NEW_NAMESPACE, _PRIVATE = 0x00020000, 0x44000  # CLONE_NEWNS; MS_REC | MS_PRIVATE
_REMOUNT = 0x20
_SLOW_US = 8000

SAVES = 30  # of the loop whose disk is full for some of them


def judged(
    tally: Tally, course: Attacked, label: str, aims: dict[int, Aim], prepare: Callable[[Path], None] | None = None
) -> list[dict[str, Any]]:
    """Do a run of a course, judge it into `tally` and return what its ranks noted."""
    tally.tried += 1
    folder, judged = course.fresh(course.root / f"judged-{tally.tried}"), Tally()
    ends = course.run(folder / "run", aims, prepare=prepare)
    course.judge(judged, folder, ends)
    judged.problems = [(kind, f"{label}: {text}") for kind, text in judged.problems]
    tally.add(judged)
    return [end.noted for end in ends]


def quotas(root: Path, quick: bool) -> Tally:
    """Count runs that may write so many bytes to a file, or so many altogether."""
    tally = Tally()
    for name in ("trainer, new", "trainer, new, asynchronous", "trainer, resumed"):
        course = Attacked(STAGES[name], root / name.replace(", ", "-"))
        for limit in (0, 1, 50, 200, 400, 800, 1200, 3000)[:: 3 if quick else 1]:
            judged(tally, course, f"{name}, {limit} bytes a file", {}, lambda run, limit=limit: _limit_files(limit))
        for number in range(2 if quick else 20):
            for error in ("ENOSPC", "EDQUOT"):
                total = int(400 * math.exp(number / 4)) if not quick else 5000
                aim = Aim(frozenset({"write"}), 1, FOR_GOOD, error, QUOTA, total)
                judged(tally, course, f"{name}, {error} after {total} bytes", {0: aim})
    return tally


def _limit_files(limit: int) -> None:
    nothing = os.open(os.devnull, os.O_WRONLY)  # what it prints is not a part of this
    os.dup2(nothing, 1)
    os.dup2(nothing, 2)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))


def full_for_a_while(root: Path, quick: bool) -> Tally:
    """Count loops whose disk is full for some saves and free again; and metrics that wait until it is."""
    tally = Tally()
    for asynchronous in (False, True):
        for at in range(1, 60, 29 if quick else 3):
            for times in (1, 5, 20):
                _full_for_a_while(tally, root / f"{asynchronous}-{at}-{times}", asynchronous, at, times)
    course = Attacked(STAGES["trainer, new"], root / "trainer")
    lines = (course.root / "alone" / "run" / "metrics.jsonl").read_text().count("\n")
    for times in (1, 2, 4):
        for at in range(1, 5):
            _metrics_wait(tally, course, lines, at, times)
    return tally


def _full_for_a_while(tally: Tally, folder: Path, asynchronous: bool, at: int, times: int) -> None:
    folder.mkdir(parents=True)
    run = folder / "run"
    aim = Aim(failing_disk.ERRORS["ENOSPC"], at, times, "ENOSPC")

    def work(rank: int, gather: Any) -> dict[str, Any]:
        failing_disk.aim(run, aim)
        checkpointer, part, said, saved = Checkpointer(run, keep_last=2, asynchronous=asynchronous), Numbers(0), [], 0
        for step in range(1, SAVES + 1):
            part.advance(step)
            try:
                checkpointer.save(step, {"model": part})
                checkpointer.wait()
                saved = step
            except OSError as error:
                said.append(str(error))
        checkpointer.release()
        values = [value.tolist() for value in part.values.values()]
        return {"said": said, "saved": saved, "values": values, "struck": failing_disk.struck()[0]}

    [end] = in_ranks(work, 1, LIMIT_S)
    tally.tried += 1
    label = f"{'asynchronous, ' if asynchronous else ''}{aim}"
    if end.answer is None:
        tally.wrong(HUNG if end.hung else WRONG_END, f"{label}: {end}")
        return
    part = Numbers(0)
    found = Checkpointer(run).restore({"model": part})
    said = end.answer["said"]
    if found != end.answer["saved"] or found != SAVES:
        tally.wrong(LOST, f"{label}: {found} is restored, {end.answer['saved']} was saved; {said}")
    elif [value.tolist() for value in part.values.values()] != end.answer["values"]:
        tally.wrong(WRONG_END, f"{label}: another state is restored")
    if any("No space left" not in text or "free space" not in text for text in said):
        tally.wrong(WRONG_END, f"{label}: not in words: {said}")
    right = [f"checkpoint-{step}" for step in (SAVES - 1, SAVES)]
    if left := [path.name for path in run.iterdir() if path.name not in right]:
        tally.wrong(WRONG_END, f"{label}: left are {left}")
    tally.ends["said, and saved again" if said else "nothing to say"] += 1


def _metrics_wait(tally: Tally, course: Attacked, lines: int, at: int, times: int) -> None:
    tally.tried += 1
    folder = course.fresh(course.root / f"metrics-{at}-{times}")
    run = folder / "run"

    def prepare(_: Path) -> None:
        failing_disk.aim(run / "metrics.jsonl", Aim(frozenset({"write", "create"}), at, times, "ENOSPC"))

    [end] = course.run(run, {}, prepare=prepare)
    found = (run / "metrics.jsonl").read_text().count("\n") if (run / "metrics.jsonl").exists() else 0
    if [end.answer] != course.right:
        tally.wrong(WRONG_END, f"metrics, full at {at}, {times} times: {end}")
    elif found != lines and "not in it" not in end.output:
        tally.wrong(LOST, f"metrics, full at {at}, {times} times: {found} of {lines} lines, and {end.output[-500:]!r}")
    else:
        tally.ends["metrics complete" if found == lines else "said what is missing"] += 1


def small_disks(root: Path, quick: bool) -> Tally:
    """Count runs on a real file system of some size, which is made larger afterwards."""
    tally = Tally()
    course = Attacked(STAGES["trainer, new"], root / "trainer")
    for blocks in range(4, 96, 40 if quick else 6):
        for asynchronous in (False, True):
            folder = root / f"{blocks}-{asynchronous}"
            folder.mkdir()
            work = _on_small_disk(folder / "run", blocks * 4096, course, asynchronous=asynchronous)
            [end] = in_ranks(work, 1, LIMIT_S)
            if end.answer == ["no right"]:
                print("  no right to mount: no small disks here", flush=True)
                return tally
            tally.tried += 1
            if end.answer is None:
                tally.wrong(HUNG if end.hung else WRONG_END, f"{blocks} blocks: {end}")
                continue
            tally.ends[end.answer[0]] += 1
            for kind, text in end.answer[1:]:
                tally.wrong(kind, f"{blocks} blocks: {text}")
    return tally


def _on_small_disk(run: Path, size: int, course: Attacked, *, asynchronous: bool) -> Callable[..., list[Any]]:
    def work(rank: int, gather: Any) -> list[Any]:
        library = ctypes.CDLL(None, use_errno=True)
        if library.unshare(_NEW_NAMESPACE) or library.mount(b"none", b"/", None, _PRIVATE, None):
            return ["no right"]
        run.mkdir()
        # Seen by this process alone, and gone with it.
        if library.mount(b"tmpfs", os.fsencode(run), b"tmpfs", 0, f"size={size}".encode()):
            return ["no right"]
        options = {"world_size": 1, "asynchronous": asynchronous}
        said: list[Any] = ["as if left alone"]
        try:
            course.stage.work(run, 0, gather, **options)
        except Exception as error:
            said[0] = "in words"
            if not is_in_words_of(error, run):
                said.append((WRONG_END, f"not in words: {type(error).__name__}: {error}"))
        found, passed = newest(run, course.stage)
        if found < noted("complete", 0):
            said.append((LOST, f"{noted('complete', 0)} was complete, {found} is left; {passed}"))
        library.mount(b"none", os.fsencode(run), None, _REMOUNT, b"size=100m")
        if [course.stage.work(run, 0, gather, **options)] != course.right:
            said.append((WRONG_END, "once there is space it ends otherwise"))
        return said

    return work


def is_in_words_of(error: Exception, run: Path) -> bool:
    """As `is_in_words`, of an error that is at hand."""
    return isinstance(error, OSError | ValueError) and (str(run) in str(error) or "checkpoint-" in str(error))


def slow_disks(root: Path, quick: bool) -> Tally:
    """Count runs whose writes and syncs take long: training goes on meanwhile where it saves asynchronously."""
    tally = Tally()
    aim = Aim(frozenset({"write", "sync", "create"}), 1, FOR_GOOD, mode=WAIT, value=_SLOW_US)
    names = ("trainer, new, asynchronous", "trainer, new", "trainer, resumed", "two ranks, new, asynchronous")
    for name in names[: 1 if quick else None]:
        course = Attacked(STAGES[name], root / name.replace(", ", "-"))
        for rank in range(course.stage.world_size):
            [found, *_] = judged(tally, course, f"{name}, rank {rank}", {rank: aim})
            if name == names[0]:
                _judge_order(tally, found.get("places", []))
    return tally


def _judge_order(tally: Tally, places: list[list[Any]]) -> None:
    """The loop saves and takes its next step before the slow disk has taken the checkpoint, for each but the last."""
    for step in (2, 4, 6):
        saved, complete = (places.index([place, step]) for place in (crash_training.SAVED, crash_training.COMPLETE))
        if not any(place == "in the forward" for place, _ in places[saved:complete]):
            tally.wrong(WRONG_END, f"training waited for checkpoint-{step} to be written: {places}")
