"""Clocks that go back, and process numbers that are used again."""

from __future__ import annotations

import math
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import failing_disk
from conditions_disk import judged
from runner import LOST, WRONG_END, Tally
from storage_stages import STAGES, Attacked, newest

from tr_ckpt.testing import this_process

HOUR, YEAR = 3600, 365 * 24 * 3600


def clocks(root: Path, quick: bool) -> Tally:
    """Count runs whose clock is off, or jumps there and back while they run."""
    tally = Tally()
    to_1970 = -int(time.time()) + 1
    for name in ("trainer, new", "trainer, resumed, asynchronous", "two ranks, new, asynchronous"):
        course = Attacked(STAGES[name], root / name.replace(", ", "-"))
        for seconds in (-HOUR, -YEAR, YEAR, to_1970)[: 2 if quick else None]:
            for turn in (0, 1, 2, 7, 40)[:: 2 if quick else 1]:

                def prepare(run: Path, seconds: int = seconds, turn: int = turn) -> None:
                    failing_disk.set_clock(seconds, turn)

                before = len(tally.problems)
                [noted, *_] = judged(tally, course, f"{name}, {seconds} s by {turn}", {}, prepare)
                if len(tally.problems) == before:
                    _judge_speeds(tally, noted.get("history", []), f"{name}, {seconds} s by {turn}")
    if tally.ends["in words"]:
        tally.wrong(WRONG_END, f"{tally.ends['in words']} runs ended because of a clock")
    return tally


def _judge_speeds(tally: Tally, history: list[dict[str, float]], label: str) -> None:
    for entry in history:
        for key, value in entry.items():
            if key.endswith(("_runtime", "_per_second")) and not (math.isfinite(value) and 0 <= value < HOUR * 1e6):
                tally.wrong(WRONG_END, f"{label}: {key} is {value}")
            if key.endswith("_runtime") and value > HOUR:
                tally.wrong(WRONG_END, f"{label}: {key} is {value}")


def numbers_used_again(root: Path, quick: bool) -> Tally:
    """Count runs beside temporary folders of every kind, whose makers' numbers others have by now, or nobody."""
    tally = Tally()
    course = Attacked(STAGES["trainer, resumed"], root / "trainer")
    kinds = ("writing", "records", "replaced", "removed", "pushing", "fetched")
    for kind in kinds[:: 3 if quick else 1]:
        for whose, process in _processes():
            for target in ("checkpoint-6", "checkpoint-8"):
                for whole in (True, False):
                    _beside(tally, course, kind, whose, process, target, whole=whole)
    return tally


def _processes() -> Iterator[tuple[str, Callable[[], str]]]:
    here = this_process()
    gone = os.fork()
    if gone == 0:
        os._exit(0)
    os.waitpid(gone, 0)
    yield "the run itself", lambda: f"{here.host}@{os.getpid()}.{here.numbering}"
    yield "another living one", lambda: f"{here.host}@{here.pid}.{here.numbering}"
    yield "the first of all", lambda: f"{here.host}@1.{here.numbering}"
    yield "nobody", lambda: f"{here.host}@{gone}.{here.numbering}"
    yield "one before the last start", lambda: f"{here.host}@{here.pid}.0123abcd"
    yield "one of an earlier version", lambda: f"{here.host}@{here.pid}"
    yield "another machine", lambda: f"elsewhere@{here.pid}.{here.numbering}"
    yield "no number", lambda: f"{here.host}@{10**30}.{here.numbering}"


def _beside(
    tally: Tally, course: Attacked, kind: str, whose: str, process: Callable[[], str], target: str, *, whole: bool
) -> None:
    tally.tried += 1
    folder = course.fresh(course.root / f"{tally.tried}")
    run = folder / "run"

    def prepare(_: Path) -> None:
        place = run / f".tmp-{kind}-{target}@{process()}@1234abcd"
        shutil.copytree(run / "checkpoint-6", place)
        if not whole:
            (place / "manifest.json").unlink()

    ends = course.run(run, {}, prepare=prepare)
    label = f"{kind} {target} of {whose}{'' if whole else ', without its manifest'}"
    if [end.answer for end in ends] != course.right:
        tally.wrong(WRONG_END, f"{label}: {'; '.join(map(str, ends))}")
        return
    left = {path.name for path in run.iterdir() if path.is_dir()}
    if newest(run, course.stage)[0] != 8 or not {"checkpoint-6", "checkpoint-8"} <= left:
        tally.wrong(LOST, f"{label}: left are {sorted(left)}")
        return
    tally.ends["left" if any(name.startswith(".tmp") for name in left) else "cleared"] += 1
    shutil.rmtree(folder)
