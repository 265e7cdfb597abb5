"""Make random runs, and compare each with transformers, with a loop by hand, and with itself uninterrupted.

`nox -s fuzz -- --seed 1 --n 5000` runs it; the README here says what it does.
"""

import argparse
import os
import sys
import time
from collections import Counter, defaultdict
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from faults import print_table
from fuzz_check import check, shrink, timed_check
from fuzz_configuration import Run
from fuzz_families import FAMILIES, draw
from fuzz_trainers import settle

CHUNK = 25


def main(argv=None):
    """Do what the command line says; return 1 if a discrepancy was found."""
    options = read_options(argv)
    settle()
    if options.repeat:
        return repeat(options.repeat)
    if options.faults:
        return print_table(options.n, options.seed)
    report = Report(options)
    for results in chunks_of_results(options):
        report.add(results)
        if options.minutes and report.seconds() > 60 * options.minutes:
            break
    return report.close()


def read_options(argv=None):
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1, help="of the session (%(default)s)")
    parser.add_argument("--n", type=int, default=1000, help="how many runs (%(default)s)")
    parser.add_argument("--first", type=int, default=0, help="number of the first one (%(default)s)")
    parser.add_argument("--minutes", type=float, help="end after so many")
    parser.add_argument("--family", choices=FAMILIES, help="only this one")
    parser.add_argument("--workers", type=int, default=1, help="processes (%(default)s)")
    parser.add_argument(
        "--faults", action="store_true", help="plant faults in our code instead: --n runs must find each"
    )
    parser.add_argument("--repeat", metavar="LINE", help="make one run again, as a finding prints it")
    parser.add_argument("--shown", type=int, default=20, help="findings to make minimal, the first ones (%(default)s)")
    return parser.parse_args(argv)


def chunks_of_results(options):
    """Yield lists of a run, what was compared, what was found and seconds."""
    last = options.first + options.n
    chunks = [(options.seed, range(n, min(n + CHUNK, last)), options.family) for n in range(options.first, last, CHUNK)]
    if options.workers == 1:
        yield from map(results_of, chunks)
        return
    # Not a Pool, whose processes may have none of their own, as ranks and workers are.
    with ProcessPoolExecutor(options.workers, get_context("spawn"), initializer=settle) as pool:
        for done in as_completed([pool.submit(results_of, chunk) for chunk in chunks]):
            yield done.result()


def results_of(chunk):
    """Check some runs."""
    seed, numbers, family = chunk
    runs = [draw(seed, number, family) for number in numbers]
    return [(run, *timed_check(run)) for run in runs]


def repeat(line):
    """Make one run again and print what is found."""
    run = eval(line, {"Run": Run})
    compared, found = check(run)
    print(
        run, f"compared with: {', '.join(compared)}", *(f"{name}: {words}" for name, words in found.items()), sep="\n"
    )
    return int(bool(found))


class Report:
    """Counts of a session, and its findings."""

    def __init__(self, options):
        self._options, self._began_s = options, time.monotonic()
        self._runs, self._found, self._busy_s = Counter(), Counter(), defaultdict(float)
        self._compared, self._shown = Counter(), 0

    def seconds(self):
        """Return the seconds since the beginning."""
        return time.monotonic() - self._began_s

    def add(self, results):
        """Take in some runs, and print what they found in its plainest form."""
        for run, compared, found, busy_s in results:
            self._runs[run.family] += 1
            self._busy_s[run.family] += busy_s
            self._compared.update(compared)
            self._found[run.family] += bool(found)
            for oracle, words in found.items():
                self._show(run, oracle, words)
        done, many = self._runs.total(), self._options.n
        print(f"{done:6} of {many} runs, {self._found.total()} discrepancies, {self.seconds():.0f} s", file=sys.stderr)

    def _show(self, run, oracle, words):
        self._shown += 1
        if self._shown > self._options.shown:
            print(f"DISCREPANCY ({oracle}): {words}\n  {run!r}", flush=True)
            return
        plain, shrunk = shrink(run, oracle)
        print(f"DISCREPANCY ({oracle}): {shrunk or words}\n  {plain!r}\n  found as {run!r}")
        print(f'  nox -s fuzz -- --repeat "{plain!r}"', flush=True)

    def close(self):
        """Print the table; return 1 if a discrepancy was found."""
        print(f"{'family':12} {'runs':>6} {'discrepancies':>14} {'ms a run':>9}")
        for family in self._runs:
            runs, each_ms = self._runs[family], 1000 * self._busy_s[family] / self._runs[family]
            print(f"{family:12} {runs:6} {self._found[family]:14} {each_ms:9.0f}")
        for oracle, count in sorted(self._compared.items()):
            print(f"compared with {oracle}: {count}")
        print(f"runs {self._runs.total()}, discrepancies {self._found.total()}, {self.seconds():.0f} s")
        return int(self._found.total() > 0)


if __name__ == "__main__":
    sys.exit(main())
