"""Measure the memory that training takes above the model, for one optimizer after another, each in new processes.

Three measures of a few steps:

- tensors: bytes of all tensors alive at the peak, as torch's allocator reports them; the same in every run
- resident: by how much the process's resident memory grew at the peak; linear algebra's own memory is in it, and code
  that was loaded
- resident, as it is: the same without the setting that the one before is measured with, `MALLOC_TRIM_THRESHOLD_=131072`

The setting is for all alike. Its value is the one that glibc begins with; set, it stays. Else, as large tensors are
freed, glibc raises the size from which it gives memory back, up to 64 MiB: from then on large tensors lie between small
ones, and how much is kept of what was freed depends on where the heap happens to begin, from process to process.

Run: python memory.py [--optimizers lomo galore_adamw_layerwise --repeats 5]
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
from contestants import UPSTREAM, state_bytes, stepper, write_json
from language_model import LanguageModel
from torch.profiler import ProfilerActivity, profile

MIB = 2**20
SIZES = {
    "48.8M": {"vocabulary": 8192, "width": 768, "layers": 6, "heads": 12},
    "tiny": {"vocabulary": 256, "width": 64, "layers": 2, "heads": 4},
}
RANKS = {"48.8M": 128, "tiny": 8}
TOKENS, STEPS = 32, 4
OPTIMIZERS = (
    *("backward only", "adamw", "galore_adamw", "galore_adamw_layerwise", "galore_adamw_8bit_layerwise", "lomo"),
    *("adalomo", *UPSTREAM),
)
# What is to be held, of resident memory.
LIMITS_MIB = {"galore_adamw_layerwise": 290, "lomo": 135, "adalomo": 155}
FIXED = {"MALLOC_TRIM_THRESHOLD_": "131072"}


def resident_bytes(which: str) -> int:
    """Return the memory in use by this process: `VmRSS` now, `VmHWM` at most."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(which))


def measure(name: str, size: str, *, profiled: bool) -> dict[str, float]:
    """Train a few steps in this process; return the peak above the model in MiB, and what else was seen."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = LanguageModel(**SIZES[size])
    tokens = torch.randint(SIZES[size]["vocabulary"], (1, TOKENS + 1))
    step, optimizers = stepper(name, model, 1e-3, rank=RANKS[size])
    gc.collect()
    if profiled:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            for _ in range(STEPS):
                step(model(tokens))
        changes = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
        alive = peak = 0
        for event in sorted(changes, key=lambda event: event.start_ns()):
            alive += event.nbytes()
            peak = max(peak, alive)
        return {"tensors": peak / MIB}
    Path("/proc/self/clear_refs").write_text("5")  # the highest mark begins again
    before = resident_bytes("VmRSS")
    times = []
    for _ in range(STEPS):
        begun = time.process_time()
        step(model(tokens))
        times.append(time.process_time() - begun)
    peak = resident_bytes("VmHWM") - before
    return {"peak": peak / MIB, "state": state_bytes(optimizers) / MIB, "first_s": times[0], "later_s": min(times[1:])}


def in_new_process(name: str, size: str, environment: dict[str, str], *, profiled: bool) -> dict[str, float]:
    command = [sys.executable, __file__, "--measure", name, "--size", size, *(["--profiled"] if profiled else [])]
    plain = {key: value for key, value in os.environ.items() if not key.startswith("MALLOC_")}
    done = subprocess.run(
        command, env={**plain, **environment}, capture_output=True, text=True, timeout=600, check=False
    )
    if done.returncode:
        raise SystemExit(f"error: measuring {name} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def compare(options: argparse.Namespace) -> None:
    parameters = sum(p.numel() for p in LanguageModel(**SIZES[options.size]).parameters())
    print(
        f"{parameters / 1e6:.1f} M parameters ({parameters * 4 / MIB:.0f} MiB in float32), {TOKENS} tokens, rank "
        f"{RANKS[options.size]}; MiB above the model at the peak of {STEPS} steps, {options.repeats} processes each\n"
    )
    print(
        f"{'':26}{'tensors':>8}{'resident':>18}{'limit':>7}{'as it is':>18}{'state':>8}{'first step':>12}{'later':>9}"
    )
    results = {}
    for name in options.optimizers:
        tensors = in_new_process(name, options.size, {}, profiled=True)["tensors"]
        found = {
            key: [in_new_process(name, options.size, environment, profiled=False) for _ in range(options.repeats)]
            for key, environment in (("fixed", FIXED), ("as it is", {}))
        }
        peaks = {key: [one["peak"] for one in many] for key, many in found.items()}
        spread = {
            key: f"{statistics.median(values):.0f} ({min(values):.0f} - {max(values):.0f})"
            for key, values in peaks.items()
        }
        any_run = found["fixed"][0]
        results[name] = {"tensors_mib": tensors, "resident_mib": peaks["fixed"], "as_it_is_mib": peaks["as it is"]}
        results[name] |= {"state_mib": any_run["state"], "limit_mib": LIMITS_MIB.get(name)}
        print(
            f"{name:26}{tensors:8.0f}{spread['fixed']:>18}{LIMITS_MIB.get(name, ''):>7}{spread['as it is']:>18}"
            f"{any_run['state']:8.1f}{any_run['first_s']:10.2f} s{any_run['later_s']:7.2f} s",
            flush=True,
        )
    write_json(options.json, {"size": options.size, "optimizers": results})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--optimizers", nargs="+", default=list(OPTIMIZERS))
    parser.add_argument("--size", choices=SIZES, default="48.8M")
    parser.add_argument("--repeats", type=int, default=3, help="processes for each figure (default 3)")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    parser.add_argument("--profiled", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options.measure, options.size, profiled=options.profiled)))
    else:
        compare(options)


if __name__ == "__main__":
    main()
