"""Run `python -m mutants`: see `--help`."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import time
from pathlib import Path

from mutants.changes import Change, changes_of, sample
from mutants.reach import Reach
from mutants.report import described, print_report
from mutants.scope import SCOPE, mutated_files
from mutants.trials import Trials
from packages import ROOT

# What all tests import: once here, not in each forked process.
WARM = ("numpy", "torch", "torch.utils.data", "torch._dynamo", "torch.distributed", "torch.distributed.checkpoint",
        "safetensors.torch", "huggingface_hub", "yaml", "rich.progress")  # fmt: skip


def options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="mutants", description="Count the planted faults that tests catch.")
    parser.add_argument("--n", type=int, default=300, help="how many faults, spread evenly over the files")
    parser.add_argument("--seed", type=int, default=1, help="chooses the faults")
    parser.add_argument("--workers", type=int, default=2, help="faults that are tried at once")
    parser.add_argument("--folder", type=Path, required=True, help="where results and what tests reach are kept")
    parser.add_argument("--package", choices=list(SCOPE), action="append", help="only this package")
    parser.add_argument("--only", default="", help="only files whose path holds this text, with all their faults")
    parser.add_argument("--again", action="store_true", help="try those that survived once more")
    parser.add_argument("--budget", type=float, default=120.0, help="seconds of tests that a fault may take")
    parser.add_argument("--least", type=float, default=0.9, help="the part to be caught")
    return parser.parse_args()


def warm_up() -> None:
    """Import what is slow to import."""
    # For pytest that is the folder; who looks for a function's module, as torch does, remembers the file of each name.
    del sys.modules["packages"]
    os.environ["OMP_NUM_THREADS"] = "1"
    for name in WARM:
        try:
            importlib.import_module(name)
        except ImportError:
            continue  # tests of what it is for are skipped, or import it themselves


def chosen(given: argparse.Namespace) -> tuple[list[tuple[str, Change]], dict[str, str]]:
    """Return the changes, each with its package, and the texts of their files."""
    owners = {str(path): name for name in given.package or SCOPE for path in mutated_files(name)}
    texts = {path: (ROOT / path).read_text("utf-8") for path in owners if given.only in path}
    if given.only:
        found = [change for path, text in texts.items() for change in changes_of(path, text)][: given.n]
    else:
        found = sample(texts, given.n, given.seed)
    return [(owners[change.path], change) for change in found], texts


def see(reaches: list[Reach], workers: int) -> None:
    """See which tests run what, and which of them fail without a fault."""
    for reach in reaches:
        reach.collect(workers)
        reach.load()
    for first in range(0, len(reaches), workers):
        begun = [(reach, reach.begin_control()) for reach in reaches[first : first + workers]]
        for reach, child in begun:
            reach.end_control(child)


def main() -> int:
    """Try the changes that have no result yet, and report on all."""
    given = options()
    folder = given.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "results.jsonl"
    known: dict[str, dict] = {}
    if file.exists():
        known = {(result := json.loads(row))["key"]: result for row in file.read_text("utf-8").splitlines()}
    changes, texts = chosen(given)
    keys = {change.key(texts[change.path]): (name, change) for name, change in changes}
    again = {key for key in known if given.again and known[key]["outcome"] in ("survived", "run by no test")}
    todo = {key: pair for key, pair in keys.items() if key not in known or key in again}
    print(f"{len(keys)} faults in {len({c.path for _, c in changes})} files, {len(todo)} to try", flush=True)
    if todo:
        warm_up()
        reaches = {name: Reach(name, folder) for name in sorted({name for name, _ in todo.values()})}
        see(list(reaches.values()), given.workers)
        begun, count = time.monotonic(), 0

        def done(result: dict) -> None:
            nonlocal count
            count += 1
            known[result["key"]] = result
            with file.open("a", encoding="utf-8") as rows:
                rows.write(json.dumps(result) + "\n")
            spent = time.monotonic() - begun
            print(f"[{count}/{len(todo)}, {spent:.0f} s] {result['outcome']} {result['seconds']} s {described(result)}",
                  flush=True)  # fmt: skip

        Trials(reaches, texts, folder, given.workers, given.budget, done).run(todo.values())
    return 0 if print_report([known[key] for key in keys]) >= given.least else 1


if __name__ == "__main__":
    sys.exit(main())
