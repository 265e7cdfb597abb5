"""Run a script on transformers' Trainer and on this one, one after the other, and print where their numbers part."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tr_all.comparison import Comparison, Key, compare
from tr_all.known_causes import causes_of

SIDES = ("transformers", "ours")
EQUAL, DIFFERENT, FAILED, INTERRUPTED = 0, 1, 2, 130
LAST_LINES = 20  # of a failed run's errors
POLL = 0.2  # seconds between two looks at a run
ANNOUNCED = 15.0  # seconds between two lines about its progress
OUTPUT = "--output_dir"
SHOWN_TENSORS = 3


def compare_script(script: Path, arguments: Sequence[str], folder: Path | None = None, same_draws: bool = False) -> int:
    """Run a script twice, compare, and print the result.

    Args:
        script: the script.
        arguments: its arguments.
        folder: where both runs write; None takes a new temporary one, which is removed where the runs are equal.
        same_draws: let both runs draw the same random numbers, whatever order they draw in.

    Returns:
        0 if the runs are equal to the bit, 1 if they differ, 2 if one of them failed.
    """
    if find_spec("transformers") is None:
        _say("transformers is not installed, so there is nothing to compare with: pip install transformers", sys.stderr)
        return FAILED
    if folder is not None and folder.exists() and any(folder.iterdir()):
        _say(f"{folder} is not empty; give --into a folder that is new or empty", sys.stderr)
        return FAILED
    temporary = folder is None
    root = Path(tempfile.mkdtemp(prefix="trainer-compare-") if folder is None else folder).resolve()
    status = FAILED
    try:
        status = _compare_in(root, script, arguments, same_draws)
    except KeyboardInterrupt:
        status = INTERRUPTED
    finally:
        if temporary and status in (EQUAL, INTERRUPTED):
            shutil.rmtree(root, ignore_errors=True)
        else:
            _say(f"\nboth runs are in {root}")
    return status


def _compare_in(root: Path, script: Path, arguments: Sequence[str], same_draws: bool) -> int:
    extra = ["--same-draws"] if same_draws else []
    for side in SIDES:
        code = _run(side, root / side, [*extra, str(script), *output_below(root / side, arguments)])
        if code != 0:
            errors = (root / side / "stderr.txt").read_text(encoding="utf-8", errors="replace").splitlines()
            name = "transformers' Trainer" if side == SIDES[0] else "this Trainer"
            _say(f"\nthe script failed on {name} with exit code {code}. The last lines of its errors:", sys.stderr)
            _say("\n".join(f"  {line}" for line in errors[-LAST_LINES:]), sys.stderr)
            return FAILED
    comparison = compare(*(root / side for side in SIDES))
    if not comparison.theirs.begins and not comparison.theirs.count:
        _say("\nthe script built no Trainer that trained, evaluated or predicted: nothing to compare", sys.stderr)
        return FAILED
    _say("\n" + report(comparison))
    (root / "comparison.json").write_text(json.dumps(_summary(comparison), indent=2))
    return EQUAL if comparison.equal else DIFFERENT


def _run(side: str, folder: Path, program: Sequence[str]) -> int:
    """Run the script on one Trainer, with lines about its progress; return its exit code."""
    folder.mkdir(parents=True)
    words = [sys.executable, "-m", "tr_all.recording", "--trainer", side, "--folder", str(folder), *program]
    started = time.monotonic()
    _say(f"{side}: started")
    with (folder / "stdout.txt").open("wb") as out, (folder / "stderr.txt").open("wb") as errors:
        process = subprocess.Popen(words, stdout=out, stderr=errors)
        try:
            _watch(process, side, folder / "recorded.jsonl", started)
        except BaseException:
            process.terminate()
            process.wait()
            raise
    _say(f"{side}: ended after {time.monotonic() - started:.0f} s{_progress(folder / 'recorded.jsonl')}")
    return process.returncode


def _watch(process: subprocess.Popen[bytes], side: str, path: Path, started: float) -> None:
    announced = started
    while process.poll() is None:
        time.sleep(POLL)
        now = time.monotonic()
        if now - announced >= ANNOUNCED:
            announced = now
            _say(f"{side}: {now - started:.0f} s{_progress(path)}")


def _progress(path: Path) -> str:
    """Return what a run has logged last, in words."""
    events = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")] if path.exists() else []
    begins = [event["values"].get("max_steps") for event in events if event["event"] == "begin"]
    logs = [event for event in events if event["event"] == "log"]
    if not logs:
        return ""
    loss = [f", loss {event['values']['loss']:.4g}" for event in logs if isinstance(event["values"].get("loss"), float)]
    steps = f" of {begins[-1]}" if begins else ""
    return f", step {logs[-1]['step']}{steps}, {len(logs)} log entries{loss[-1] if loss else ''}"


def output_below(folder: Path, arguments: Sequence[str]) -> list[str]:
    """Return a script's arguments with an `--output_dir` below a folder."""
    words = list(arguments)
    for place, word in enumerate(words):
        if word == OUTPUT and place + 1 < len(words):
            words[place + 1] = str(folder / Path(words[place + 1]).name)
        elif word.startswith(f"{OUTPUT}="):
            words[place] = f"{OUTPUT}={folder / Path(word.split('=', 1)[1]).name}"
    return words


def _summary(comparison: Comparison) -> dict[str, Any]:
    """Return what a program may ask of a comparison."""
    return {
        "equal": comparison.equal,
        "entries": comparison.theirs.count,
        "differing": sorted(comparison.differing()),
        "weights_equal": comparison.weights_equal,
        "causes": [cause.row for cause in causes_of(comparison)],
    }


def report(comparison: Comparison) -> str:
    """Return a comparison as text: where the runs part, a table of the keys, the weights, and known causes."""
    parts = [_headline(comparison), "", *_table(comparison.keys.values()), "", *_weights(comparison)]
    if causes := causes_of(comparison):
        parts += ["", "known causes that apply, each a row of packages/tr-core/docs/differences.md:"]
        parts += [f"  {cause.row}\n    {cause.why}" for cause in causes]
        if any(cause.draws for cause in causes):
            parts += ["", "--same-draws shows whether anything differs but the random numbers"]
    elif not comparison.equal:
        parts += ["", "none of the known causes applies; packages/tr-core/docs/differences.md has all differences"]
    return "\n".join(parts)


def _headline(comparison: Comparison) -> str:
    count, parting = comparison.theirs.count, comparison.parting
    trainers = len(comparison.theirs.entries)
    of = "" if trainers == 1 else f" of {trainers} Trainers"
    if parting is None:
        return f"equal: {count} log entries{of}, to the bit"
    which = "" if trainers == 1 else f" of Trainer {parting.trainer + 1}"
    for name, side in (("transformers", parting.theirs), ("ours", parting.ours)):
        if not side:
            return f"they part at step {parting.step}{which}: {name} has no entry {parting.place + 1} in the log"
    return f"they part at step {parting.step}{which}, in entry {parting.place + 1} of the log"


def _table(keys: Any) -> list[str]:
    head = ("key", "entries", "part at step", "transformers", "ours", "largest difference")
    rows = [head, *(_row(key) for key in keys if key.name != "step" or not key.equal)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _row(key: Key) -> tuple[str, ...]:
    if key.equal:
        return (key.name, str(key.count), "never", "", "", "")
    largest = "" if key.largest_step is None else f"{key.largest:.3g} (step {key.largest_step})"
    shown = ["missing" if value is None else repr(value) for value in (key.theirs, key.ours)]
    return (key.name, str(key.count), str(key.step), *shown, largest)


def _weights(comparison: Comparison) -> list[str]:
    ends = [end for end in comparison.theirs.ends if end]
    lines = []
    if ends or comparison.ours.ends:
        same = comparison.theirs.ends == comparison.ours.ends
        lines.append(f"weights at the end of training: {'equal to the bit' if same else 'different'}")
    for folder in comparison.folders:
        if not folder.different:
            renamed = f", {folder.renamed} under other names" if folder.renamed else ""
            lines.append(f"saved weights in {folder.name}: equal to the bit{renamed}")
            continue
        names = ", ".join(folder.different[:SHOWN_TENSORS])
        more = ", ..." if len(folder.different) > SHOWN_TENSORS else ""
        lines.append(
            f"saved weights in {folder.name}: {len(folder.different)} of {folder.count} differ ({names}{more})"
        )
    lines += [f"saved weights in {words}" for words in comparison.only]
    return lines or ["no weights were trained or saved"]


def _say(text: str, file: Any = None) -> None:
    print(text, file=file or sys.stdout, flush=True)
