"""Run the benchmarks of all packages, one after another, and write what they measured into one page.

Each benchmark compares within its own process or its own rounds, in turn, so the page gives ratios and counts. Times are
those of the machine that is named on it. On a machine with a CUDA device the benchmarks of GPUs run too.

Run: nox -s bench [-- --only step ranks | --from FILE.json]
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

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
    """

    title: str
    script: str
    options: tuple[str, ...] = ()
    writes_json: bool = False
    needs_cuda: bool = False


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
    "ranks": Part("A step of two ranks", "packages/tr-dist/bench/step.py", ("--rounds", "5"), writes_json=True),
    "frequent": Part(
        "Many logs, evaluations and saves", "packages/tr-ckpt/bench/frequent.py", ("--rounds", "5"), writes_json=True
    ),
    "saving": Part("How long a save holds training up", "packages/tr-ckpt/bench/saving.py", ("--rounds", "5")),
    "evaluation": Part("An evaluation as samples become more", "packages/tr-core/bench/eval.py"),
    "start": Part("How long it takes to start", "packages/tr-core/bench/start.py", writes_json=True),
    "growth": Part("What grows with what", "packages/tr-core/bench/growth.py", writes_json=True),
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
    Goal(f"DDP, 2 ranks, 2 layers of 16, {_HAND}", 1.05, "ranks", ("DDP, 2 layers of 16", "Trainer", "ratio")),
    Goal(f"DDP, 2 ranks, 8 layers of 256, {_HAND}", 1.02, "ranks", ("DDP, 8 layers of 256", "Trainer", "ratio")),
    Goal(
        f"FSDP2, 2 ranks, 8 layers of 256, {_HAND}",
        1.02,
        "ranks",
        ("FSDP2, a unit each layer, 8 layers of 256", "Trainer", "ratio"),
    ),
    Goal("log, evaluate and save every 2, 20 and 50 steps, beside transformers", 0.8, "frequent", ("wall", "ratio")),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmarks that are named, or all, and write the page if all ran."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=PARTS, help="run these, and write no page")
    parser.add_argument(
        "--from", dest="source", type=Path, help="run nothing: write the page from this file of results"
    )
    parser.add_argument("--name", default="performance", help="name of page and results (default performance)")
    options = parser.parse_args(arguments)
    page, results = DOCS / f"{options.name}.md", DOCS / f"{options.name}.json"
    if options.source is not None:
        page.write_text(write_page(json.loads(options.source.read_text(encoding="utf-8"))), encoding="utf-8")
        print(f"wrote {page}")
        return 0
    has_cuda = _has_cuda()
    found: dict[str, Any] = {"about": about(), "parts": {}}
    for name in options.only or [name for name, part in PARTS.items() if has_cuda or not part.needs_cuda]:
        print(f"\n== {name}: {PARTS[name].title}\n", flush=True)
        found["parts"][name] = run(PARTS[name])
    failed = [name for name, part in found["parts"].items() if part["exit"]]
    if failed:
        print(f"failed: {', '.join(failed)}; the page stays as it is", file=sys.stderr)
        return 1
    if not options.only:
        results.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        page.write_text(write_page(found), encoding="utf-8")
        print(f"wrote {page} and {results}")
    return 0


def about() -> dict[str, Any]:
    """Return date, hardware and versions."""
    versions = {}
    for name in VERSIONS:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {
        "date": datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "device": _device(),
        "python": platform.python_version(),
        "versions": versions,
    }


def run(part: Part) -> dict[str, Any]:
    """Run one benchmark, showing what it prints as it comes; return that, its results and its exit status."""
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.json"
        command = [part.script, *part.options, *(("--json", str(results)) if part.writes_json else ())]
        begun_s, lines = time.monotonic(), []
        process = subprocess.Popen([sys.executable, *command], stdout=subprocess.PIPE, text=True, cwd=ROOT)
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(line)
        return {
            "command": " ".join(("python", part.script, *part.options)),
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
        f"{about['date']}, {about['machine']}, {about['device']}, Python {about['python']}, {versions}.",
        "",
        "| what | goal, at most | measured |",
        "|---|---|---|",
    ]
    lines += [f"| {goal.what} | {goal.most:g}{goal.unit} | {_measured(goal, parts)} |" for goal in GOALS]
    for name, part in parts.items():
        title = PARTS[name].title if name in PARTS else name
        lines += ["", f"## {title}", "", f"`{part['command']}`", "", "```text", part["text"].strip("\n"), "```"]
    absent = [part.title for name, part in PARTS.items() if name not in parts]
    if absent:
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


def _device() -> str:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"


if __name__ == "__main__":
    sys.exit(main())
