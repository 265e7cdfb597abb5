"""Run the Trainer tests of transformers with its classes and with ours; explain each that passes with its only.

    python tests/ecosystem/reference_tests.py FOLDER [FILE ...]

FOLDER is a checkout of transformers, or a copy of its `tests` with `tests/trainer`; FILE names test files in it, else
all in PLACES are run. Every test that passes with their classes and not with ours needs a row in reference_tests.toml:
a difference that packages/tr-core/docs/differences.md has, or an internal of transformers that the test reaches into.
The exit status is 1 where one has none.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter
from pathlib import Path

HERE = Path(__file__).resolve().parent
REASONS = HERE / "reference_tests.toml"
DIFFERENCES = HERE.parents[1] / "packages" / "tr-core" / "docs" / "differences.md"
# The tests of the Trainer, of its schedules and of its parser of arguments.
PLACES = ("trainer/**/test_*.py", "optimization/test_*.py", "utils/test_hf_argparser.py")
SECONDS_PER_FILE = 1800
SIDES = ("theirs", "ours")


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("files", nargs="*", help="names of test files below tests/; none means all")
    parser.add_argument("--keep", type=Path, help="folder for the outcomes; a side of a file found there is not run")
    parser.add_argument("-k", default="", help="run only tests whose name has this, as pytest's -k")
    given = parser.parse_intermixed_args(argv)  # options may stand between the folder and the files
    files = test_files(given.folder, given.files)
    if not files:
        parser.error(f"no test file in {given.folder / 'tests' / 'trainer'}")
    with tempfile.TemporaryDirectory() as temporary:
        kept = given.keep or Path(temporary)
        kept.mkdir(parents=True, exist_ok=True)
        outcomes = {side: {} for side in SIDES}
        for file in files:
            for side in SIDES:
                outcomes[side] |= run(given.folder, file, side, kept, given.k)
            print(line(file, *(side_of(outcomes[side], file) for side in SIDES)), flush=True)
    return report(outcomes["theirs"], outcomes["ours"], read_reasons())


def test_files(folder, names):
    tests = folder / "tests"
    found = [path for pattern in names or PLACES for path in sorted(tests.rglob(pattern))]
    return [str(path.relative_to(folder)) for path in found]


def run(folder, file, side, kept, named=""):
    """Return how each test of a file ended on one side: name -> its line."""
    written = kept / f"{side}-{file.replace('/', '-')}.jsonl"
    if not written.exists():
        begun = written.with_suffix(".begun")
        begun.write_text("")
        pytest_in_process(folder, file, side, begun, named)
        begun.rename(written)
    lines = [json.loads(text) for text in written.read_text().splitlines()]
    return {entry["test"]: entry for entry in lines}  # the last line of a test is the worst of its parts


def pytest_in_process(folder, file, side, written, named):
    paths = [str(HERE), str(folder.resolve()), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "OUTCOMES": str(written.resolve()),
        "OURS": "1" if side == "ours" else "0",
        "HF_HUB_OFFLINE": "1",
        "PYTHONSAFEPATH": "1",
    }
    # Their settings and their conftest.py are left out: the latter puts their sources before the installed package.
    words = ["-p", "reference_plugin", "-p", "no:cacheprovider", "-c", os.devnull, "--noconftest", "-W", "ignore", "-q"]
    words += ["--rootdir", str(folder.resolve()), "--import-mode=importlib", *(["-k", named] if named else []), file]
    with (written.with_suffix(".txt")).open("w") as said:
        command = [sys.executable, "-m", "pytest", *words]
        try:
            subprocess.run(
                command, cwd=folder, env=environment, stdout=said, stderr=said, timeout=SECONDS_PER_FILE, check=False
            )
        except subprocess.TimeoutExpired:
            print(f"{file} ({side}): ended after {SECONDS_PER_FILE} s; what had run is counted")


def side_of(outcomes, file):
    return {name: entry for name, entry in outcomes.items() if name.startswith(file)}


def count(outcomes):
    counted = Counter(entry["outcome"] for entry in outcomes.values())
    return {outcome: counted[outcome] for outcome in ("passed", "failed", "skipped")}


def line(file, theirs, ours):
    both = sum(entry["outcome"] == "passed" and passed(ours, name) for name, entry in theirs.items())
    words = ", ".join(f"{number} {outcome}" for outcome, number in count(theirs).items())
    return f"{file}: with transformers {words}; of those that pass, {both} pass with ours"


def passed(outcomes, name):
    return outcomes.get(name, {}).get("outcome") == "passed"


def read_reasons():
    """Return the reasons by file and test, each checked to be of a kind that is accepted."""
    reasons = tomllib.loads(REASONS.read_text())
    rows = DIFFERENCES.read_text()
    for file, tests in reasons.items():
        for name, reason in tests.items():
            kind, _, text = reason.partition(": ")
            if kind not in ("difference", "private") or not text:
                raise SystemExit(f'{file}, {name}: a reason is "difference: words of its row" or "private: what"')
            if kind == "difference" and text not in rows:
                raise SystemExit(f"{file}, {name}: {DIFFERENCES.name} has no row with the words {text!r}")
    return reasons


def explained(reasons, name):
    file, _, test = name.partition("::")
    return reasons.get(Path(file).name, {}).get(test)


def report(theirs, ours, reasons):
    """Print the counts and each test that passes on their side only; return the exit status."""
    there = [name for name, entry in theirs.items() if entry["outcome"] == "passed"]
    only = [name for name in there if not passed(ours, name)]
    known = {name: explained(reasons, name) for name in only}
    print(f"\n{len(theirs)} tests with transformers: {count(theirs)}")
    print(f"of the {len(there)} that pass there, {len(there) - len(only)} pass with our classes, {len(only)} do not:")
    kinds = Counter(reason.partition(":")[0] if reason else "without a reason" for reason in known.values())
    print("  " + ", ".join(f"{kind} {number}" for kind, number in sorted(kinds.items())))
    for name, reason in sorted(known.items()):
        print(f"  {name}\n    {reason or 'NO REASON: ' + said(ours, name)}")
    for name in there:
        if passed(ours, name) and explained(reasons, name):
            print(f"  {name} passes now: its row in {REASONS.name} can go")
    return int(any(reason is None for reason in known.values()))


def said(ours, name):
    """Return why a test did not pass with ours, in one line."""
    entry = ours.get(name) or ours.get(name.partition("::")[0]) or {"why": "it did not run"}
    return " ".join(entry["why"].split())[:300]


if __name__ == "__main__":
    sys.exit(main())
