"""Let jobs of two and three ranks train and end: all their ranks are to end with exit code 0.

Ranks are forks of an interpreter that has everything imported, and end as an interpreter does (`forked_ranks.py`);
others are programs of their own. Some destroy their group as torch does and settle nothing: how those end is counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import cycle, islice, product
from pathlib import Path

from rank_programs import End, Job, nursery
from runner import Case, Options, Tally

LIMIT_S = 180
CONTROL_LIMIT_S = 30  # some hang
RUNS, PROGRAMS, CONTROLS = 200, 20, 16
SHOWN_CHARACTERS = 1500
# Loop, strategy, how the group is left, number of ranks.
KINDS = list(product((2, 3), ("ddp", "fsdp"), ("trainer", "own"), ("close", "nothing")))

Kind = tuple[int, str, str, str]


def forked(options: Options) -> Iterator[Case]:
    """Yield jobs whose ranks are forks."""
    for kind in islice(cycle(KINDS), 0, 7 * RUNS, 7):  # the seventh from each: in a short session too, of all kinds
        yield Case(_name(kind), partial(_fork, kind))


def programs(options: Options) -> Iterator[Case]:
    """Yield jobs whose ranks are programs."""
    for kind in islice(cycle(KINDS), PROGRAMS):
        yield Case(_name(kind), partial(_start, kind))


def control(options: Options) -> Iterator[Case]:
    """Yield jobs that settle nothing."""
    for kind in islice(cycle(KINDS), 0, 7 * CONTROLS, 7):
        yield Case(_name(kind), partial(_leave_as_torch_does, kind))


def _arguments(kind: Kind, folder: Path) -> list[object]:
    _, strategy, loop, end = kind
    return [folder / "out", "--strategy", strategy, "--loop", loop, *(["--close"] if end == "close" else [])]


def _fork(kind: Kind, folder: Path) -> str:
    return _judge(nursery().run(kind[0], _arguments(kind, folder), folder, LIMIT_S))


def _start(kind: Kind, folder: Path) -> str:
    with Job(folder) as job:
        job.start_ranks(kind[0], _arguments(kind, folder))
        return _judge(job.ends(LIMIT_S))


def _leave_as_torch_does(kind: Kind, folder: Path) -> Tally:
    words = [*_arguments(kind, folder), "--as_torch_does"]
    codes = [end.code for end in nursery().run(kind[0], words, folder, CONTROL_LIMIT_S)]
    return Tally(1, Counter({f"ended with {codes}" if any(codes) else "ended with exit code 0": 1}))


def _judge(ends: Sequence[End]) -> str:
    codes = [end.code for end in ends]
    said = "\n".join({end.said[-SHOWN_CHARACTERS:]: None for end in ends})
    return "" if codes == [0] * len(codes) else f"its ranks ended with {codes}: {said}"


def _name(kind: Kind) -> str:
    size, strategy, loop, end = kind
    left = "closed" if end == "close" else "left to the interpreter"
    return f"{size} ranks, {strategy}, {'Trainer' if loop == 'trainer' else 'own loop'}, {left}"
