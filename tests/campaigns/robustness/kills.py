"""Kill one of two ranks at each of many moments, start the job again, and compare its end with that of one left alone.

The other rank is left to itself: it has to end, and must not harm what is saved. What is compared are the bits of the
weights, all that was logged, and which rows each step used.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from rank_programs import nursery
from runner import WRONG_END, Case, Options, Tally
from sample_records import read_starts, rows_of_steps

LIMIT_S = 240
ROWS = 24  # of `rank_run.py`
WAYS = {"saving": [], "saving in the background": ["--arguments", '{"save_async": true}']}


@dataclass(frozen=True)
class Moment:
    """When a rank dies: at a place of `rank_run.py`, for the n-th time; torn in the middle of a write."""

    name: str
    rank: int
    place: str
    times: int = 1
    how: str = "kill"
    workers: int = 0

    @property
    def options(self) -> list[str]:
        """Options of `rank_run.py`."""
        counts = ("--times", str(self.times), "--workers", str(self.workers), "--rank", str(self.rank))
        return ["--place", self.place, "--how", self.how, *counts]


IN_THE_LOOP = (
    Moment("before the first step", 1, "begin"),
    Moment("in loading the first batch", 0, "dataset", 1),
    Moment("in loading data", 1, "dataset", 7),
    Moment("in the forward of the first step", 1, "forward", 1),
    Moment("in the forward", 0, "forward", 5),
    Moment("in the exchange of gradients, which the other waits in", 1, "backward", 3),
    Moment("in the exchange of gradients, which the other waits in", 0, "backward", 6),
    Moment("after the exchange, before the optimizer's step", 1, "exchanged", 4),
    Moment("at a step's end", 0, "step", 2),
    Moment("in a log", 1, "log", 2),
    Moment("in an evaluation", 0, "evaluation", 1),
    Moment("in the last evaluation", 1, "evaluation", 2),
    Moment("after a save", 1, "saved", 2),
    Moment("after a save", 0, "saved", 1),
    Moment("after the last step", 0, "end"),
)


UNLOCKING = "before the folder is unlocked"  # the run is over on the other rank
# Rank, operation on files, name of what it is done to, which one of those, how, and what that is.
IN_SAVES = (
    (0, "make_folder", r"\.tmp-writing-.*", 0, "kill", "before a save's folder is made"),
    (0, "write", r"model(-shard-0)?\.safetensors", 2, "tear", "in the middle of the write of the weights"),
    (0, "sync", r"model(-shard-0)?\.safetensors", 1, "kill", "before the weights are on the disk"),
    (0, "write", r"optimizer(-shard-0)?\.safetensors", -3, "tear", "in the middle of the write of optimizer state"),
    (1, "create", r".*-1\.safetensors", 0, "kill", "before its own file, while the other writes"),
    (1, "write", r".*-1\.safetensors", -4, "tear", "in the middle of the write of its own file"),
    (1, "sync", r".*-1\.safetensors", 1, "kill", "before its own file is on the disk"),
    (1, "sync", r"rng-1\.json", 1, "after", "after its share, before the commit"),
    (1, "sync", r"rng-1\.json", -1, "after", "after its share of the last save, before the commit"),
    (0, "create", r"manifest\.json", 1, "kill", "before the manifest, when all shares are written"),
    (0, "write", r"manifest\.json", 0, "tear", "in the middle of the manifest"),
    (0, "sync", r"manifest\.json", 2, "kill", "before the manifest is on the disk"),
    (0, "rename", r"\.tmp-writing-.*", 1, "kill", "before the folder gets its name"),
    (0, "sync_folder", r"run", 1, "kill", "when the folder has its name"),
    (0, "remove_file", r"[^.].*", 0, "kill", "before the first file of an old checkpoint is removed"),
    (0, "remove_file", r"[^.].*", -2, "kill", "in removing an old checkpoint"),
    (0, "link", r"\.tmp-lock-.*", 0, "kill", "before the folder is locked"),
    (0, "link", r"\.tmp-lock-.*", 0, "after", "when the folder has been locked"),
    (0, "remove_file", r"\.run-lock\.json", 0, "kill", UNLOCKING),
)


def moments_of_saves(folder: Path) -> list[Moment]:
    """Return moments of saves, found in what a run left alone did with files.

    Raises:
        LookupError: it did not do what is looked for.
    """
    found = []
    for rank, operation, name, which, how, words in IN_SAVES:
        [start] = read_starts(folder, rank)
        done = [(each["operation"], Path(each["path"]).name) for each in start if "operation" in each]
        fitting = [
            number for number, (this, path) in enumerate(done, 1) if this == operation and re.fullmatch(name, path)
        ]
        if not fitting:
            raise LookupError(f"rank {rank} did no {operation} of {name}, but {done}")
        place = "file done" if how == "after" else "file"
        moment = Moment(words, rank, place, fitting[which], "tear" if how == "tear" else "kill")
        found.append(moment)
    return found


class Campaign:
    """Kills in one way to train.

    Args:
        root: an empty folder.
        options: options of `rank_run.py` that every run has.
    """

    def __init__(self, root: Path, options: list[str]) -> None:
        self._options = options
        ends = nursery().run(2, [root / "alone" / "out", *options], root / "alone", LIMIT_S)
        if any(end.code for end in ends):
            raise RuntimeError(f"the run left alone ended with {[end.code for end in ends]}: {ends[0].said}")
        self.out = root / "alone" / "out"
        self.end = read_end(self.out)
        self.rows = rows_of_steps(self.out)

    def kill(self, moment: Moment, folder: Path) -> Tally:
        """Kill a rank, start the job again, and return what is wrong."""
        out, options = folder / "out", [*self._options, *moment.options]
        ends = nursery().run(2, [out, *options], folder / "first", LIMIT_S)
        codes = [end.code for end in ends]
        if not (out / "struck").exists():
            return Tally.of("it did not strike: " + ends[0].said[-500:])
        after_s = max(end.time_s for end in ends) - float((out / "struck").read_text())
        wrong = [] if codes[moment.rank] == -9 else [f"rank {moment.rank} ended with {codes[moment.rank]}"]
        is_over = moment.place == "end" or moment.name == UNLOCKING
        if codes[1 - moment.rank] in ((None,) if is_over else (0, None)):
            wrong.append(f"the other ended with {codes[1 - moment.rank]}: {ends[1 - moment.rank].said[-3000:]}")
        wrong += [f"{len(left)} processes are left"] if (left := nursery().left_over()) else []
        if moment.place == "end":  # all is done: what is saved needs no second start, but bears one
            (out / "end.json").unlink(missing_ok=True)
        again = nursery().run(2, [out, *options], folder / "again", LIMIT_S)
        if any(end.code for end in again):
            wrong.append(f"the next start ended with {[end.code for end in again]}: {again[0].said}")
        else:
            wrong += self._compare(out)
        return Tally(1, Counter({f"all ended within {math.ceil(after_s)} s": 1}), [(WRONG_END, text) for text in wrong])

    def _compare(self, out: Path) -> list[str]:
        end, wrong = read_end(out), []
        wrong += [f"its {name} are others" for name in self.end if end[name] != self.end[name]]
        rows = rows_of_steps(out)
        wrong += [] if rows == self.rows else [f"its steps used {rows}, not {self.rows}"]
        used = sorted(row for step in rows.values() for row in step)
        return wrong + ([] if used == list(range(ROWS)) else [f"of {ROWS} rows it used {used}"])


def read_end(out: Path) -> dict[str, Any]:
    """Return what the run ended with: digest of the weights, what was logged, number of steps."""
    return json.loads((out / "end.json").read_text())


def kills(options: Options) -> Iterator[Case]:
    """Yield kills with each strategy and way to save."""
    for strategy, way in product(("ddp", "fsdp"), WAYS):
        place = options.folder / f"{strategy} {way}".replace(" ", "-")
        campaign = Campaign(place, ["--strategy", strategy, *WAYS[way]])
        for moment in [*([] if WAYS[way] else IN_THE_LOOP), *moments_of_saves(campaign.out)]:
            yield Case(f"{strategy}, {way}: rank {moment.rank} {moment.name}", partial(campaign.kill, moment))
