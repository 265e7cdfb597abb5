"""Let jobs of two and three ranks train and end, and count those whose ranks all end with exit code 0.

`python clean_exits.py --runs 200` prints a line for each kind of job and, last, `200 of 200 jobs ended
with exit code 0`; it exits with 1 if one did not. Ranks are forks of an interpreter that has everything imported, and
end as an interpreter does (`forked_ranks.py`); `--programs N` has N more whose ranks are programs of their own, and
`--control N` counts how N end that destroy their group as torch does and settle nothing.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from itertools import cycle, islice, product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from rank_programs import End, Job, Nursery

LIMIT_S = 180
CONTROL_LIMIT_S = 30  # some hang
SHOWN, SHOWN_CHARACTERS = 5, 1500
# Loop, strategy, how the group is left, number of ranks.
KINDS = list(product((2, 3), ("ddp", "fsdp"), ("trainer", "own"), ("close", "nothing")))


def arguments_of(kind: tuple[int, str, str, str]) -> list[str]:
    """Return the options of `rank_run.py`."""
    _, strategy, loop, end = kind
    return ["--strategy", strategy, "--loop", loop, *(["--close"] if end == "close" else [])]


def forked(runs: int, extra: tuple[str, ...] = (), limit_s: float = LIMIT_S) -> Iterator[tuple[str, list[End]]]:
    """Yield the name and the ends of each job, whose ranks are forks."""
    with Nursery() as nursery, tempfile.TemporaryDirectory(prefix="exits-") as root:
        # The seventh from each: in a short session too, jobs of all kinds.
        for number, kind in enumerate(islice(cycle(KINDS), 0, 7 * runs, 7)):
            folder = Path(root, str(number))
            yield _name(kind), nursery.run(kind[0], [folder / "out", *arguments_of(kind), *extra], folder, limit_s)


def programs(runs: int) -> Iterator[tuple[str, list[End]]]:
    """Yield the name and the ends of each job, whose ranks are programs."""
    with tempfile.TemporaryDirectory(prefix="exits-") as root:
        for number, kind in enumerate(islice(cycle(KINDS), runs)):
            folder = Path(root, str(number))
            with Job(folder) as job:
                job.start_ranks(kind[0], [folder / "out", *arguments_of(kind)])
                yield f"{_name(kind)}, programs", job.ends(LIMIT_S)


def _name(kind: tuple[int, str, str, str]) -> str:
    size, strategy, loop, end = kind
    left = "closed" if end == "close" else "left to the interpreter"
    return f"{size} ranks, {strategy}, {'Trainer' if loop == 'trainer' else 'own loop'}, {left}"


def is_clean(ends: list[End]) -> bool:
    """Return whether all ranks ended with exit code 0."""
    return all(end.code == 0 for end in ends)


def _control(runs: int) -> str:
    """Return how many jobs end otherwise that leave as torch does, with their exit codes; None is a hang."""
    jobs = list(forked(runs, ("--as_torch_does",), CONTROL_LIMIT_S))
    codes = Counter(str([end.code for end in ends]) for _, ends in jobs if not is_clean(ends))
    shown = ", ".join(f"{count} times {code}" for code, count in codes.items())
    return f"control: {codes.total()} of {runs} jobs that settle nothing end otherwise: {shown}"


def main(arguments: list[str] | None = None) -> int:
    """Do what the command line says, and return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--programs", type=int, default=0)
    parser.add_argument("--control", type=int, default=0)
    options = parser.parse_args(arguments)
    began_s, total, clean, shown = time.monotonic(), Counter[str](), Counter[str](), 0
    for jobs in (forked(options.runs), programs(options.programs)):
        for name, ends in jobs:
            total[name] += 1
            clean[name] += is_clean(ends)
            if not is_clean(ends) and (shown := shown + 1) <= SHOWN:
                print(f"NOT CLEAN: {name}: {[end.code for end in ends]}")
                print(*{end.said[-SHOWN_CHARACTERS:]: None for end in ends}, sep="\n", flush=True)
    for name in sorted(total):
        print(f"{name:<58} {clean[name]:>4} of {total[name]:>4}")
    if options.control:
        print(_control(options.control), flush=True)
    print(f"{time.monotonic() - began_s:.0f} s")
    print(f"{clean.total()} of {total.total()} jobs ended with exit code 0")
    return 0 if clean == total else 1


if __name__ == "__main__":
    sys.exit(main())
