"""Let one rank fail in every way, and see that all end, how soon, with which exit codes, and what is said first.

Ranks are forks of an interpreter (`forked_ranks.py`), started by nobody, so that each has to end by itself; or programs
that `trainer launch` or torchrun starts, which end the others.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path

from rank_programs import RANK_RUN, TORCHRUN, TRAINER, End, Job, nursery
from runner import WRONG_END, Case, Options, Tally

LIMIT_S = 240
# From the failure to the end of the last process. On an idle machine it is one or two; the rest is for busy ones.
WITHIN_S = 60
WORDS = "ArithmeticError"
# The last line of a traceback, after torch's mark of the rank.
_LAST_LINE = re.compile(r"^(?:\[rank\d+\]: )?[\w.]*(?:Error|Exception)\b.*", re.MULTILINE)


@dataclass(frozen=True)
class Failure:
    """How one rank fails.

    Attributes:
        name: what it is.
        place: where, as `rank_run.py` calls it.
        how: in which way.
        code: exit code of that rank.
        times: when it is there for this time.
        workers: processes that load data; it is one of them that fails in `dataset`.
        is_together: all ranks learn of it in the same moment, and none is first.
    """

    name: str
    place: str
    how: str = "raise"
    code: int = 1
    times: int = 2
    workers: int = 0
    is_together: bool = False

    @property
    def options(self) -> list[str]:
        """Options of `rank_run.py`."""
        counts = ("--times", str(self.times), "--workers", str(self.workers))
        return ["--place", self.place, "--how", self.how, *counts]


FAILURES = (
    Failure("exception in the forward", "forward"),
    Failure("exception in the backward", "backward"),
    Failure("exception in a callback", "step"),
    Failure("exception in a callback at the beginning", "begin", times=1),
    Failure("exception in the data set", "dataset", times=5),
    Failure("exception in a worker of the loader", "dataset", times=5, workers=1),
    Failure("exception in compute_metrics", "evaluation", times=1),
    Failure("exception in a save", "file", times=1, is_together=True),
    Failure("exception after training", "end", times=1),
    Failure("sys.exit(5) in a callback", "step", "sys.exit", 5),
    Failure("os._exit(3) in the forward", "forward", "exit", 3),
    Failure("SIGKILL in the forward", "forward", "kill", -9),
    Failure("SIGABRT in the forward", "forward", "abort", -6),
    Failure("SIGKILL of a worker of the loader", "dataset", "kill", 1, times=5, workers=1),
)


def judge(failure: Failure, rank: int, ends: Sequence[End], after_s: float, left: list[int]) -> list[str]:
    """Return what is wrong with how the ranks ended."""
    wrong = []
    codes = [end.code for end in ends]
    # After training nobody waits for the rank that fails.
    expects = [code for number, code in enumerate(codes) if number != rank] if failure.place != "end" else [1]
    if codes[rank] != failure.code:
        wrong.append(f"rank {rank} ended with {codes[rank]}, not with {failure.code}")
    if any(code in (0, None) for code in expects):
        wrong.append(f"the others ended with {expects}")
    if after_s > WITHIN_S:
        wrong.append(f"it took {after_s:.1f} s")
    if left:
        wrong.append(f"{len(left)} processes are left")
    first = first_error(ends[rank].said)
    if failure.how == "raise" and WORDS not in first and not failure.is_together:
        wrong.append(f"the first error that is said is {first!r}")
    return wrong


def first_error(said: str) -> str:
    """Return the last line of the first traceback."""
    found = _LAST_LINE.search(said)
    return found.group() if found else ""


def failures_by(launcher: str) -> Callable[[Options], Iterator[Case]]:
    """Return what yields each failure with each strategy, of ranks that `launch`, `torchrun` or `nobody` starts."""

    def cases(options: Options) -> Iterator[Case]:
        for number, (failure, strategy) in enumerate(product(FAILURES, ("ddp", "fsdp"))):
            rank = (number + number // 2) % 2
            work = partial(_fail, launcher, failure, strategy, rank)
            yield Case(f"{failure.name}, rank {rank} of {strategy}", work)

    return cases


def _fail(launcher: str, failure: Failure, strategy: str, rank: int, folder: Path) -> Tally:
    words = [folder / "out", "--strategy", strategy, "--rank", str(rank), *failure.options]
    if launcher == "nobody":
        ends, left = nursery().run(2, words, folder, LIMIT_S), nursery().left_over()
    else:
        with Job(folder) as job:
            job.start([*_COMMANDS[launcher], RANK_RUN, *words])
            ends, left = job.ends(LIMIT_S), job.left_over()
    after_s = _seconds_after(folder, ends)
    if after_s is None:
        return Tally.of("it did not strike: " + ends[0].said[-500:])
    if launcher == "nobody":
        wrong = judge(failure, rank, ends, after_s, left)
    else:
        wrong = _judge_launched(failure, rank, ends[0], after_s, left, launcher)
    return Tally(1, Counter({f"all ended within {math.ceil(after_s)} s": 1}), [(WRONG_END, text) for text in wrong])


_COMMANDS = {"launch": [*TRAINER, "--nproc", "2"], "torchrun": [*TORCHRUN, "--standalone", "--nproc-per-node=2"]}


def _judge_launched(
    failure: Failure, rank: int, end: End, after_s: float, left: list[int], launcher: str
) -> list[str]:  # fmt: skip
    wrong = [f"it took {after_s:.1f} s"] if after_s > WITHIN_S else []
    wrong += [f"{len(left)} processes are left"] if left else []
    # torchrun ends with 1 whatever the rank ended with.
    expected = (128 - failure.code if failure.code < 0 else failure.code) if launcher == "launch" else 1
    if end.code != expected:
        wrong.append(f"the launcher ended with {end.code}, not with {expected}")
    if failure.how == "raise" and not failure.is_together and WORDS not in first_error(end.said):
        wrong.append(f"the first error that is said is {first_error(end.said)!r}")
    if launcher == "launch":
        report = end.said.rpartition("trainer launch: rank ")[2]
        if not report.startswith(f"{rank} of 2 failed first") and not failure.is_together:
            wrong.append(f"the report begins with {report[:80]!r}")
        if failure.how == "raise" and WORDS not in first_error(report):
            wrong.append(f"the first error of the report is {first_error(report)!r}")
    return wrong


def _seconds_after(folder: Path, ends: Sequence[End]) -> float | None:
    struck = folder / "out" / "struck"
    return max(end.time_s for end in ends) - float(struck.read_text()) if struck.exists() else None
