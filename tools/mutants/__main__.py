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
from mutants.report import CAUGHT, described, print_report
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


def withdraw(known: dict[str, dict], reaches: dict[str, Reach]) -> set[str]:
    """Run every test that caught something without a fault; return those that fail, whose catches are withdrawn."""
    failed: set[str] = set()
    for name, reach in reaches.items():
        own = [result for result in known.values() if result["path"].startswith(f"packages/{name}/")]
        if catchers := {result["test"] for result in own if result["outcome"] == "caught"}:
            print(f"control: {len(catchers)} tests of {name} that caught something, without a fault", flush=True)
            failed |= reach.control(catchers)
    for result in known.values():
        if result.get("test") in failed:
            print(f"  withdrawn, {result['test']} fails without a fault: {described(result)}")
            result["outcome"] = "not judged: its test fails without a fault"
    return failed


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
    again = {key for key in known if given.again and known[key]["outcome"] not in CAUGHT}
    todo = {key: pair for key, pair in keys.items() if key not in known or key in again}
    print(f"{len(keys)} faults in {len({c.path for _, c in changes})} files, {len(todo)} to try", flush=True)
    if todo:
        warm_up()
        reaches = {name: Reach(name, folder) for name in sorted({name for name, _ in todo.values()})}
        unreliable = folder / "unreliable.json"
        left_out = set(json.loads(unreliable.read_text("utf-8"))) if unreliable.exists() else set()
        for reach in reaches.values():
            reach.collect(given.workers)
            reach.load(left_out)
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
        if failed := withdraw({key: known[key] for key in keys}, reaches):
            unreliable.write_text(json.dumps(sorted(left_out | failed)), encoding="utf-8")
            file.write_text("".join(json.dumps(result) + "\n" for result in known.values()), encoding="utf-8")
    return 0 if print_report([known[key] for key in keys]) >= given.least else 1


if __name__ == "__main__":
    sys.exit(main())
