"""Measure what a start costs: imports, help and errors of the command line, and `train()` until its first step.

Every figure is of fresh processes, in turn, several rounds; modules are compiled before, as an installation does. The
start of a training is compared with the same by hand: a loader, torch's fused AdamW and a schedule. torch's optimizers
import its compiler when the first one is built, in both.

Run: nox -s bench -- start [--rounds 9 --json FILE]
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

IMPORT = """
import sys, time
{before}
number, since = len(sys.modules), time.process_time()
{code}
print(time.process_time() - since, len(sys.modules) - number)
"""
COMMAND = "import sys; from tr_all.cli import main; sys.exit(main())"
FIRST_STEP = """
import sys, tempfile, time
import torch
{before}
class Stop(Exception):
    pass
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(16, 16)
    def forward(self, x, labels):
        print(time.process_time() - since, len(sys.modules) - number)
        raise Stop
data = [{{"x": torch.zeros(16), "labels": torch.tensor(0)}} for _ in range(256)]
model, compiled = Model(), {compiler}
if compiled:
    torch.optim.AdamW(model.parameters())
try:
    {code}
except Stop:
    pass
"""
BY_HAND = """
    number, since = len(sys.modules), time.process_time()
    loader = torch.utils.data.DataLoader(data, 8, shuffle=True)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer)
    model(**next(iter(loader)))
"""
TRAINER = """
    args = TrainingArguments(tempfile.mkdtemp(), use_cpu=True, max_steps=4, log_level="error")
    trainer = Trainer(model, args, train_dataset=data)
    number, since = len(sys.modules), time.process_time()
    trainer.train()
"""
SNIPPETS = {
    "import tr_log": IMPORT.format(before="", code="import tr_log"),
    "import tr_args": IMPORT.format(before="", code="import tr_args"),
    "import tr_core": IMPORT.format(before="import torch", code="import tr_core"),
    "from tr_core import Trainer": IMPORT.format(before="import torch", code="from tr_core import Trainer"),
    "import tr_all": IMPORT.format(before="import torch", code="import tr_all"),
    "from tr_all import *": IMPORT.format(before="import torch", code="from tr_all import *"),
}
STARTS = {
    (by, compiler): FIRST_STEP.format(before=before, code=code, compiler=compiler)
    for by, before, code in (
        ("by hand", "", BY_HAND),
        ("train()", "from tr_core import Trainer, TrainingArguments", TRAINER),
    )
    for compiler in (False, True)
}
COMMANDS = ("--help", "nonsense", "launch --help", "launch --bad script.py", "check --help", "ckpt ls --bad")
WITH = {False: "torch's compiler not yet imported", True: "torch's compiler imported before"}


def environment(folder: str) -> dict[str, str]:
    """Return the variables of a process whose modules are compiled once, in `folder`."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return {**kept, "PYTHONPYCACHEPREFIX": folder, "OMP_NUM_THREADS": "1"}


def measure(variables: dict[str, str]) -> dict[str, dict[str, float]]:
    """Return, of each figure, the seconds of processor time and the number of modules of one process."""
    found: dict[str, dict[str, float]] = {}
    has_all = importlib.util.find_spec("tr_all") is not None
    snippets = {name: code for name, code in SNIPPETS.items() if has_all or "tr_all" not in name}
    snippets |= {f"to the first step, {by}; {WITH[compiler]}": code for (by, compiler), code in STARTS.items()}
    for name, code in snippets.items():
        done = subprocess.run(
            [sys.executable, "-c", code], env=variables, capture_output=True, text=True, check=True, timeout=300
        )
        seconds, modules = done.stdout.split()[-2:]
        found[name] = {"cpu_s": float(seconds), "modules": int(modules)}
    for words in COMMANDS if has_all else ():
        before, since = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        subprocess.run(
            [sys.executable, "-c", COMMAND, *words.split()],
            env=variables,
            capture_output=True,
            timeout=300,
            check=False,
        )
        wall_s, after = time.perf_counter() - since, resource.getrusage(resource.RUSAGE_CHILDREN)
        spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        found[f"trainer {words}"] = {"cpu_s": spent, "wall_s": wall_s}
    return found


def run(rounds: int) -> dict[str, dict[str, float]]:
    """Return the median of each figure; one round before them compiles the modules."""
    with tempfile.TemporaryDirectory() as folder:
        measure(environment(folder))
        each = [measure(environment(folder)) for _ in range(rounds)]
    figures = {
        name: {key: statistics.median(one[name][key] for one in each) for key in each[0][name]}
        | {"least_cpu_s": min(one[name]["cpu_s"] for one in each)}
        for name in each[0]
    }
    for words in WITH.values():
        hand, ours = (figures[f"to the first step, {by}; {words}"]["cpu_s"] for by in ("by hand", "train()"))
        figures[f"to the first step, train() over by hand; {words}"] = {"cpu_s": ours - hand}
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path, default=None, help="also write the figures to this file")
    options = parser.parse_args()
    figures = run(options.rounds)
    print(f"{options.rounds} interleaved rounds of fresh processes; medians of processor time\n")
    for name, figure in figures.items():
        modules = f"{figure['modules']:5.0f} modules" if "modules" in figure else ""
        print(f"{name:76} {figure['cpu_s'] * 1e3:7.1f} ms {modules}".rstrip())
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
