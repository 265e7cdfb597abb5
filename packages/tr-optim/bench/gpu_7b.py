"""Measure LOMO and 8-bit GaLore on a Llama of 7 billion parameters in bfloat16: memory, and the time of a step.

Each case runs in a new process. On a GPU, memory is the most that torch's allocator had given out at once (the highest
mark of what tensors took), weights and all; on a CPU, where this is only tried, the growth of resident memory.
A step's time is the mean over steps in which matrices find new bases as often as over a whole run; the first step,
which finds all, is left out.

Run: python gpu_7b.py [--size tiny --device cpu]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from contestants import build, update
from llama import CONFIGS, Llama

GIB = 2**30
RANKS = {"7b": 1024, "1b": 512, "tiny": 16}


@dataclass(frozen=True)
class Case:
    """One measurement.

    Attributes:
        optimizer: its name, as of `contestants.build`.
        batch: rows.
        length: tokens of a row.
        checkpoints: whether activations are computed again.
        published_gib: memory that a paper has for this.
        published_s: mean time of an optimizer's step that a paper has.
        steps: measured, after the first.
    """

    optimizer: str
    batch: int
    length: int
    checkpoints: bool
    published_gib: float | None = None
    published_s: float | None = None
    steps: int = 3


# LOMO: table 1 of its paper, whose 0.24 GB for the largest gradient are GiB. GaLore: section 5.5, rank 1024.
# Times: table 7 of the APOLLO paper, on an A100. 224 matrices and a gap of 200: 20 steps have a tenth of all refreshes.
CASES = {
    "memory, LOMO": Case("lomo", 8, 512, True, published_gib=14.58),
    "memory, AdaLomo": Case("adalomo", 8, 512, True),
    "memory, 8-bit layer-wise GaLore": Case("galore_adamw_8bit_layerwise", 1, 500, False, published_gib=22.0),
    "step, AdamW": Case("adamw:fused", 1, 256, True, published_s=0.173, steps=20),
    "step, GaLore": Case("galore_adamw", 1, 256, True, published_s=2.874, steps=20),
    "step, GaLore with full SVD": Case("galore_adamw:method=svd", 1, 256, True, published_s=2.874, steps=20),
}
# Whose mean step is compared with AdamW's, and may take so many times as long.
COMPARED, MOST_TIMES = "step, GaLore", 2.0


def measure(case: Case, size: str, device: str) -> dict[str, float]:
    """Train a few steps in this process; return the highest memory in GiB and the mean time of `step` in seconds."""
    torch.manual_seed(0)
    begun_at = _memory_gib(device)
    with torch.device(device):
        torch.set_default_dtype(torch.bfloat16)
        model = Llama(CONFIGS[size], checkpoints=case.checkpoints)
    torch.set_default_dtype(torch.float32)
    optimizer = build(case.optimizer, model, 1e-5, rank=RANKS[size])
    taken: list[float] = []

    def timed_step() -> None:
        begun = _now(device)
        plain_step()
        taken.append(_now(device) - begun)

    plain_step, optimizer.step = optimizer.step, timed_step
    losses = []
    for _ in range(1 + case.steps):
        tokens = torch.randint(CONFIGS[size].vocab_size, (case.batch, case.length + 1), device=device)
        loss = model(tokens)
        update(optimizer, model, loss)
        losses.append(loss.detach())
    if not torch.stack(losses).isfinite().all():
        raise SystemExit(f"error: {case.optimizer} gave losses that are not finite: {losses}")
    parameters = sum(p.numel() for p in model.parameters())
    memory = _memory_gib(device, at_most=True) - begun_at
    return {"memory_gib": memory, "step_s": sum(taken[1:]) / case.steps, "parameters": parameters}


def _now(device: str) -> float:
    if device == "cpu":
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def _memory_gib(device: str, *, at_most: bool = False) -> float:
    if device != "cpu":
        return torch.cuda.max_memory_allocated() / GIB
    which = "VmHWM" if at_most else "VmRSS"
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(which)) / GIB


def in_new_process(name: str, size: str, device: str) -> dict[str, float] | str:
    """Return what a case gave, or the last line of why it could not be measured."""
    command = [sys.executable, __file__, "--measure", name, "--size", size, "--device", device]
    done = subprocess.run(command, capture_output=True, text=True, timeout=3600, check=False)
    if done.returncode:
        return (done.stderr.strip().splitlines() or ["no output"])[-1]
    return json.loads(done.stdout.splitlines()[-1])


def compare(options: argparse.Namespace) -> int:
    where = torch.cuda.get_device_name() if options.device != "cpu" else "CPU, only to try this script"
    print(f"Llama {options.size}, bfloat16, rank {RANKS[options.size]}; {where}; torch {torch.__version__}\n")
    print(f"{'':34}{'tokens':>10}{'memory':>12}{'published':>12}{'mean step':>13}{'published':>12}")
    found: dict[str, dict[str, float]] = {}
    failures = 0
    for name in options.cases:
        case, result = CASES[name], in_new_process(name, options.size, options.device)
        tokens = f"{case.batch} x {case.length}"
        if isinstance(result, str):
            failures += 1
            print(f"{name:34}{tokens:>10}   not measured: {result}", flush=True)
            continue
        found[name] = result
        is_published = options.size == "7b"
        published = f"{case.published_gib:.2f} GiB" if is_published and case.published_gib else ""
        step = f"{case.published_s:.3f} s" if is_published and case.published_s else ""
        print(
            f"{name:34}{tokens:>10}{result['memory_gib']:8.2f} GiB{published:>12}{result['step_s']:11.4f} s{step:>12}",
            flush=True,
        )
    if COMPARED in found and "step, AdamW" in found:
        ratio = found[COMPARED]["step_s"] / found["step, AdamW"]["step_s"]
        print(f"\na mean step of GaLore, with refreshes, takes {ratio:.2f} times AdamW's; the goal is {MOST_TIMES:g}")
    if options.json:
        cases = {name: {"case": asdict(CASES[name]), **result} for name, result in found.items()}
        options.json.write_text(json.dumps({"where": where, "size": options.size, "cases": cases}) + "\n")
    return failures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=CONFIGS, default="7b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--json", type=Path, help="where to write what was found")
    parser.add_argument("--measure", choices=CASES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(CASES[options.measure], options.size, options.device)))
    elif compare(options):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
