"""Run the examples on their real data, each in a process of its own, and require of each that its results are good.

    python run_all.py                                          # all of them
    python run_all.py token_classification custom_loop         # those named

They run in the folder `outputs/run_all`, where what an earlier call left is removed, but for SmolLM2 as it was taken
out of its package. The exit code is 1 if an example fails or a metric misses its bound.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
FOLDER = Path("outputs/run_all")


@dataclass(frozen=True)
class Bound:
    """What a metric must be.

    Attributes:
        metric: its name in the example's `all_results.json`.
        at_least: a number, or the name of another metric; None for no such bound.
        at_most: likewise.
    """

    metric: str
    at_least: float | str | None = None
    at_most: float | str | None = None

    def holds(self, results: Mapping[str, float]) -> bool:
        """Whether the results keep to it; NaN does not."""
        value = results[self.metric]
        return (self.at_least is None or value >= _number(self.at_least, results)) and (
            self.at_most is None or value <= _number(self.at_most, results)
        )

    def __str__(self) -> str:
        return f">= {self.at_least}" if self.at_least is not None else f"<= {self.at_most}"


@dataclass(frozen=True)
class Example:
    """A script, and what is required of it.

    Attributes:
        script: its path in this folder.
        output_dir: where it writes its results by its own defaults, from the folder that it runs in.
        bounds: what its metrics must be.
        words: arguments that it gets.
    """

    script: str
    output_dir: str
    bounds: tuple[Bound, ...]
    words: tuple[str, ...] = ()


# The bounds leave room for another seed or another order of additions, and none for a run that did not learn.
EXAMPLES = {
    "text_classification": Example(
        "text_classification/quickstart.py",
        "outputs/quickstart",
        (Bound("predict_accuracy", at_least=0.90), Bound("predict_f1", at_least=0.6)),
    ),
    "language_modeling": Example(
        "language_modeling/language_modeling.py",
        "outputs/language_modeling",
        (Bound("test_perplexity", at_most=70.0), Bound("test_bits_per_character", at_most=1.85)),
    ),
    "language_modeling-smollm2": Example(
        "language_modeling/language_modeling.py",
        "outputs/language_modeling-smollm2",
        (Bound("before_perplexity", at_least=35.0), Bound("test_perplexity", at_most=32.0)),
        ("--model", "smollm2"),
    ),
    "whole_model": Example(
        "language_modeling/whole_model.py",
        "outputs/whole_model-adalomo",
        # With AdamW 1,026 MiB of state and a peak of 2,016 MiB.
        (
            Bound("test_perplexity", at_most=28.0),
            Bound("optimizer_mib", at_most=2),
            Bound("train_peak_mib", at_most=1000),
        ),
        ("--method", "adalomo"),
    ),
    "image_classification": Example(
        "image_classification/image_classification.py",
        "outputs/image_classification",
        (Bound("test_accuracy", at_least=0.95),),
    ),
    "token_classification": Example(
        "token_classification/token_classification.py",
        "outputs/token_classification",
        (
            Bound("test_accuracy", at_least=0.91),
            Bound("test_f1", at_least=0.88),
            Bound("test_lookup_accuracy", at_most="test_accuracy"),
        ),
    ),
    "translation": Example(
        "translation/translation.py",
        "outputs/translation",
        (
            Bound("test_chrf", at_least="test_nearest_chrf"),
            Bound("test_exact", at_least=0.17),
            Bound("test_nearest_exact", at_most=0.1),
        ),
    ),
    "custom_loop": Example(
        "custom_loop/custom_loop.py", "outputs/custom_loop", (Bound("test_accuracy", at_least=0.95),)
    ),
}


@dataclass
class Outcome:
    """What became of an example.

    Attributes:
        name: which.
        example: it.
        code: exit code of its process.
        wall_s: seconds that it took.
        cpu_s: seconds of processor time, over all threads.
        results: its metrics; empty if it wrote none.
    """

    name: str
    example: Example
    code: int
    wall_s: float
    cpu_s: float
    results: dict[str, float] = field(default_factory=dict)

    @property
    def is_good(self) -> bool:
        """Whether it ran to its end and kept to all bounds."""
        return self.code == 0 and all(
            bound.metric in self.results and bound.holds(self.results) for bound in self.example.bounds
        )

    def rows(self) -> Iterator[tuple[str, ...]]:
        """Yield the lines of the table for it, one a bound."""
        for number, bound in enumerate(self.example.bounds):
            value = self.results.get(bound.metric)
            kept = value is not None and bound.holds(self.results)
            seconds = (f"{self.wall_s:.0f}", f"{self.cpu_s:.0f}") if number == 0 else ("", "")
            verdict = f"failed with code {self.code}" if self.code else "ok" if kept else "MISSED"
            shown = "none" if value is None else f"{value:.4g}"
            yield (self.name if number == 0 else "", bound.metric, shown, str(bound), verdict, *seconds)


def main(argv: Sequence[str] | None = None) -> int:
    """Run examples and print a table; returns the exit code.

    Args:
        argv: names of examples; None takes this program's.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"which: {', '.join(EXAMPLES)}; without a name, all")
    names = parser.parse_args(argv).names or list(EXAMPLES)
    if unknown := [name for name in names if name not in EXAMPLES]:
        parser.error(f"there is no example {unknown[0]!r}; there are {', '.join(EXAMPLES)}")
    outcomes = [run(name, EXAMPLES[name]) for name in names]
    print("\n" + table(outcomes))
    bad = [outcome.name for outcome in outcomes if not outcome.is_good]
    print(f"examples {len(outcomes)}, failed or out of bounds {len(bad)}{': ' + ', '.join(bad) if bad else ''}")
    return 1 if bad else 0


def run(name: str, example: Example) -> Outcome:
    """Run one example in a new process, without the results and checkpoints of an earlier call."""
    command = [sys.executable, str(HERE / example.script), *example.words]
    print(f"\n=== {name}: python {example.script} {' '.join(example.words)}".rstrip(), flush=True)
    FOLDER.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(FOLDER / example.output_dir, ignore_errors=True)
    before, started_s = _cpu_of_children_s(), time.perf_counter()
    code = subprocess.run(command, cwd=FOLDER, check=False).returncode
    outcome = Outcome(name, example, code, time.perf_counter() - started_s, _cpu_of_children_s() - before)
    results = FOLDER / example.output_dir / "all_results.json"
    if results.is_file():
        outcome.results = json.loads(results.read_text(encoding="utf-8"))
    return outcome


def table(outcomes: Sequence[Outcome]) -> str:
    """Return what was measured, a line for each bound."""
    header = ("example", "metric", "value", "must be", "", "wall s", "cpu s")
    rows = [header, *(row for outcome in outcomes for row in outcome.rows())]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join(lines)


def _number(bound: float | str, results: Mapping[str, float]) -> float:
    return results[bound] if isinstance(bound, str) else bound


def _cpu_of_children_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    sys.exit(main())
