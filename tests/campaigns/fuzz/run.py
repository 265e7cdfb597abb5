"""Make random runs, and compare each with transformers, with a loop by hand, and with itself uninterrupted.

`nox -s fuzz -- --seed 1 --n 5000` runs it; the README here says what it does.
"""

import argparse
import os
import sys
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import faults
from fuzz_check import check, shrink
from fuzz_configuration import Run
from fuzz_families import FAMILIES, draw
from fuzz_trainers import settle
from runner import WRONG_END, Campaign, Case, Group, Options, Tally, main

_shown = Counter()  # findings of this process


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of random runs."""
    parser.add_argument("--n", type=int, default=1000, help="how many runs (%(default)s)")
    parser.add_argument("--first", type=int, default=0, help="number of the first one (%(default)s)")
    parser.add_argument("--family", choices=FAMILIES, help="only this one")
    parser.add_argument("--faults", action="store_true", help="plant faults in our code: --n runs must find each")
    parser.add_argument("--repeat", metavar="LINE", help="make one run again, as a finding prints it")
    parser.add_argument("--shown", type=int, default=20, help="findings of a process to make plain (%(default)s)")


def prepare(options: Options) -> Options:
    """Choose what is to be done, and settle what forks of this process share."""
    settle()
    if options.repeat or options.faults:
        options.only = ["repeat" if options.repeat else "faults"]
    return options


def runs(options: Options) -> Iterator[Case]:
    """Yield random runs."""
    for number in range(options.first, options.first + options.n):
        run = draw(options.seed, number, options.family)
        yield Case(repr(run), partial(_judge, run, options.shown), run.family)


def repeat(options: Options) -> Iterator[Case]:
    """Yield the run that was asked for."""
    run = eval(options.repeat, {"Run": Run})
    yield Case(repr(run), partial(_judge, run, 0))


def _judge(run: Run, shown: int, folder: Path) -> Tally:
    compared, found = check(run)
    tally = Tally(1, Counter(f"compared with {oracle}" for oracle in compared))
    for oracle, words in found.items():
        _shown["findings"] += 1
        plain = ""
        if _shown["findings"] <= shown:
            plainest, shrunk = shrink(run, oracle)
            plain = f', which is of {plainest!r}: {shrunk}; nox -s fuzz -- --repeat "{plainest!r}"'
        tally.wrong(WRONG_END, f"({oracle}) {words}{plain}")
    return tally


GROUPS = {
    "runs": Group("random runs, a row for each family", runs),
    "faults": Group("faults planted in our code: random runs must find each", faults.cases, is_default=False),
    "repeat": Group("one run again", repeat, is_default=False),
}

if __name__ == "__main__":
    nouns = ("runs", "discrepancies")
    sys.exit(main(Campaign("fuzz", __doc__ or "", GROUPS, nouns, prepare=prepare, add_options=add_options)))
