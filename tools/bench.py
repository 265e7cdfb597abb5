"""Run the benchmarks of all packages, one after another, and write what they measured into one page.

Each benchmark compares in turn, in several rounds of its own, so the page gives ratios and counts. Times are those of
the machine that is named on it. On a machine with a CUDA device the benchmarks of GPUs run too.

Run: nox -s bench, or one of them with options of its own: nox -s bench -- step --rounds 9
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from machine import about

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "packages" / "tr-all" / "docs"
VERSIONS = ("torch", "transformers", "lightning", "accelerate", "numpy")
PART_LIMIT_S = 3600


@dataclass(frozen=True)
class Part:
    """One benchmark.

    Attributes:
        title: its heading on the page.
        script: path of the script, from the root of the repository.
        options: what it is called with.
        writes_json: whether it has `--json FILE`.
        needs_cuda: whether it runs only where there is a CUDA device.
        by_name_only: whether it does not belong to the whole run: it takes hours, or makes a figure.
        all_threads: whether torch takes as many threads as it does by itself, instead of one.
    """

    title: str
    script: str
    options: tuple[str, ...] = ()
    writes_json: bool = False
    needs_cuda: bool = False
    by_name_only: bool = False
    all_threads: bool = False


PARTS = {
    "step": Part(
        "A training step", "packages/tr-core/bench/step.py", ("--rounds", "7", "--steps", "800"), writes_json=True
    ),
    "defaults": Part(
        "What the default callbacks cost a step",
        "packages/tr-core/bench/step.py",
        ("--defaults", "--rounds", "5", "--steps", "2000"),
        writes_json=True,
    ),
    "two-ranks": Part("A step of two ranks", "packages/tr-dist/bench/step.py", ("--rounds", "5"), writes_json=True),
    "capture": Part("Captured steps", "packages/tr-core/bench/capture.py", ("--rounds", "5"), writes_json=True),
    "rewind": Part("What going back before a spike costs a step", "packages/tr-core/bench/rewind.py", writes_json=True),
    "frequent": Part(
        "Many logs, evaluations and saves", "packages/tr-ckpt/bench/frequent.py", ("--rounds", "5"), writes_json=True
    ),
    "saving": Part("How long a save holds training up", "packages/tr-ckpt/bench/saving.py", all_threads=True),
    "evaluation": Part("An evaluation as samples become more", "packages/tr-core/bench/eval.py"),
    "start": Part("How long it takes to start", "packages/tr-core/bench/start.py", ("--rounds", "5"), writes_json=True),
    "growth": Part("What grows with what", "packages/tr-core/bench/growth.py", writes_json=True),
    "growth-of-saves": Part("What a save and a resume grow with", "packages/tr-ckpt/bench/growth.py", writes_json=True),
    "projection": Part("Low-rank bases", "packages/tr-optim/bench/projection.py"),
    "hooks": Part("Updates in the backward pass", "packages/tr-optim/bench/hooks.py"),
    "traffic": Part("Gradients on the wire", "packages/tr-optim/bench/traffic.py"),
    "memory": Part("Memory of optimizers", "packages/tr-optim/bench/memory.py"),
    "language-model": Part(
        "Language models in bfloat16",
        "packages/tr-all/bench/language_model.py",
        ("--sizes", "125M", "1.3B"),
        writes_json=True,
        needs_cuda=True,
    ),
    "7b": Part("Memory with 7 billion parameters", "packages/tr-optim/bench/gpu_7b.py", needs_cuda=True),
    "ranks": Part("What each of many ranks holds and exchanges", "packages/tr-dist/bench/ranks.py", by_name_only=True),
    "quality": Part("Losses that optimizers reach", "packages/tr-optim/bench/quality.py", by_name_only=True),
    "plot": Part("The figure of these losses", "packages/tr-optim/bench/plot.py", by_name_only=True),
}


@dataclass(frozen=True)
class Goal:
    """A number that a benchmark gives, and the most that it should be.

    Attributes:
        what: what it is, in words.
        most: the goal.
        part: the benchmark.
        keys: where the number is in its results.
        unit: unit of the number; a ratio has none.
    """

    what: str
    most: float
    part: str
    keys: tuple[str, ...]
    unit: str = ""


_HAND = "beside the same loop written by hand"
GOALS = (
    Goal(f"a step, 2 layers of 16, {_HAND}", 1.10, "step", ("2 layers of 16", "tr-core", "ratio")),
    Goal("default callbacks on a terminal, 2 layers of 16", 1.02, "defaults", ("2 layers of 16", "ratio")),
    Goal("default callbacks on a terminal, 8 layers of 256", 1.02, "defaults", ("8 layers of 256", "ratio")),
    Goal(f"DDP, 2 ranks, 2 layers of 16, {_HAND}", 1.05, "two-ranks", ("DDP, 2 layers of 16", "Trainer", "ratio")),
    Goal(f"DDP, 2 ranks, 8 layers of 256, {_HAND}", 1.02, "two-ranks", ("DDP, 8 layers of 256", "Trainer", "ratio")),
    Goal(
        f"FSDP2, 2 ranks, 8 layers of 256, {_HAND}",
        1.02,
        "two-ranks",
        ("FSDP2, a unit each layer, 8 layers of 256", "Trainer", "ratio"),
    ),
    Goal("log, evaluate and save every 2, 20 and 50 steps, beside transformers", 0.8, "frequent", ("wall", "ratio")),
    Goal(
        "`from tr_core import Trainer` after `import torch`",
        0.15,
        "start",
        ("from tr_core import Trainer", "cpu_s"),
        " s",
    ),
    Goal("all names of tr-all over torch", 0.2, "start", ("from tr_all import *", "cpu_s"), " s"),
    Goal("`trainer --help`", 0.15, "start", ("trainer --help", "cpu_s"), " s"),
    Goal("a wrong argument of `trainer launch`", 0.15, "start", ("trainer launch --bad script.py", "cpu_s"), " s"),
    Goal(
        "`train()` until its first step, over the same by hand",
        0.05,
        "start",
        ("to the first step, train() over by hand; torch's compiler imported before", "cpu_s"),
        " s",
    ),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmarks that are named, or the whole run, which writes the page."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0],
        epilog="benchmarks: " + "; ".join(f"{name}: {part.title}" for name, part in PARTS.items()),
    )
    parser.add_argument("name", nargs="?", help="run this one, and write no page; what follows goes to its script")
    parser.add_argument(
        "--from", dest="source", type=Path, help="run nothing: write the page from this file of results"
    )
    parser.add_argument("--renew", action="store_true", help="write the named one into the page of the last whole run")
    parser.add_argument("--page", default="performance", help="name of page and results (default performance)")
    given = list(sys.argv[1:] if arguments is None else arguments)
    options, rest = parser.parse_known_args(given)
    if rest and given[0] != options.name:
        parser.error(f"{rest[0]}: options of a script need the name of its benchmark before them")
    if options.name not in (None, *PARTS):
        parser.error(f"no benchmark {options.name!r}; there are {', '.join(PARTS)}")
    page, results = DOCS / f"{options.page}.md", DOCS / f"{options.page}.json"
    if options.source is not None:
        page.write_text(write_page(json.loads(options.source.read_text(encoding="utf-8"))), encoding="utf-8")
        print(f"wrote {page}")
        return 0
    found: dict[str, Any] = {"about": about(VERSIONS), "parts": {}}
    for name in [options.name] if options.name else whole_run(has_cuda=_has_cuda()):
        print(f"\n== {name}: {PARTS[name].title}\n", flush=True)
        found["parts"][name] = run(PARTS[name], tuple(rest) or PARTS[name].options)
    failed = [name for name, part in found["parts"].items() if part["exit"]]
    if failed:
        print(f"failed: {', '.join(failed)}; no page was written", file=sys.stderr)
        return 1
    if options.renew:
        found["parts"] = renewed(json.loads(results.read_text(encoding="utf-8"))["parts"], found["parts"])
    if options.name is None or options.renew:
        results.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        page.write_text(write_page(found), encoding="utf-8")
        print(f"wrote {page} and {results}")
    return 0


def whole_run(*, has_cuda: bool) -> list[str]:
    """Return the names of the benchmarks of the whole run."""
    return [name for name, part in PARTS.items() if not part.by_name_only and (has_cuda or not part.needs_cuda)]


def renewed(parts: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parts of an earlier run with new ones in their place, in the order of the page."""
    return {name: new.get(name) or parts[name] for name in PARTS if name in new or name in parts}


def run(part: Part, options: Sequence[str]) -> dict[str, Any]:
    """Run one benchmark, showing what it prints as it comes; return that, its results and its exit status."""
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.json"
        command = [part.script, *options, *(("--json", str(results)) if part.writes_json else ())]
        begun_s, lines = time.monotonic(), []
        environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
        if part.all_threads:
            environment["OMP_WAIT_POLICY"] = "PASSIVE"
        else:
            environment["OMP_NUM_THREADS"] = "1"
        started = subprocess.Popen(
            [sys.executable, *command], stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment
        )
        with started as process:
            assert process.stdout is not None
            for line in process.stdout:
                print(line, end="", flush=True)
                lines.append(line)
        return {
            "command": " ".join(("python", part.script, *options)),
            "exit": process.wait(PART_LIMIT_S),
            "seconds": round(time.monotonic() - begun_s),
            "text": "".join(lines),
            "results": json.loads(results.read_text(encoding="utf-8")) if results.exists() else {},
        }


def write_page(found: Mapping[str, Any]) -> str:
    """Return the page of a run of the benchmarks."""
    about, parts = found["about"], found["parts"]
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    lines = [
        "# Performance",
        "",
        "Written by `nox -s bench`, which measures all of it in one run: contenders in turn, several rounds, medians.",
        "Read the ratios and counts; times are those of this machine.",
        "",
        f"{about['date']}, {about['machine']}, Python {about['python']}, {versions}.",
        "",
        "| what | goal, at most | measured |",
        "|---|---|---|",
    ]
    lines += [f"| {goal.what} | {goal.most:g}{goal.unit} | {_measured(goal, parts)} |" for goal in GOALS]
    for name, part in parts.items():
        title = PARTS[name].title if name in PARTS else name
        lines += ["", f"## {title}", "", f"`{part['command']}`", "", "```text", part["text"].strip("\n"), "```"]
    if absent := [part.title for name, part in PARTS.items() if part.needs_cuda and name not in parts]:
        lines += ["", "## Not measured here", "", f"They need a CUDA device: {'; '.join(absent)}."]
    return "\n".join(lines) + "\n"


def _measured(goal: Goal, parts: Mapping[str, Any]) -> str:
    value: Any = parts.get(goal.part, {}).get("results", {})
    for key in goal.keys:
        value = value.get(key, {}) if isinstance(value, Mapping) else {}
    if not isinstance(value, int | float):
        return "not measured"
    return f"{value:.3f}{goal.unit}" + ("" if value <= goal.most else ", missed")


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


if __name__ == "__main__":
    sys.exit(main())
