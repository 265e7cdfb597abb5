"""Measure what consuming gradients in the backward pass costs beside a plain one, in a model of many small tensors.

The model is a stack of linear layers with biases: two tensors a layer. Every contestant makes one backward pass of the
same loss, in turn, and a step. Where weights are updated in the backward pass, that is a part of it, and nothing is
left to the step: compare such a one with what makes the same update in its step. Times are the processor's, of one
thread; read the ratios.

Run: python hooks.py [--rounds 20 --width 16] [--without-upstream]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from contestants import build, stepper, write_json
from torch import nn

RANK = 4
GOALS = {"lomo": 2.0, "galore_adamw_layerwise": 2.0, "adalomo": 3.0}
OURS = (
    *("adafactor:scale_parameter=true", "galore_adamw"),  # with a plain backward pass
    *GOALS,
    "galore_adamw_layerwise:mode=immediate",
)
BESIDE = ("lomo-optim lomo", "galore-torch layerwise")


def stack(width: int, layers: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))


class Contestant:
    """A model of its own, and what makes a backward pass of its loss."""

    def __init__(self, name: str, width: int, layers: int) -> None:
        self.model = stack(width, layers)
        self.inputs = torch.randn(8, width)
        self.optimizer: Any = None
        self.times: list[float] = []
        self.step_times: list[float] = []
        if name == "plain":
            self.backward: Callable[[torch.Tensor], None] = lambda loss: loss.backward()
        elif name in BESIDE:
            self.backward, _ = stepper(name, self.model, 1e-4, rank=RANK)
        else:
            self.optimizer = build(name, self.model, 1e-4, rank=RANK, gap=10_000)
            is_fused = getattr(self.optimizer, "fused_in_backward", False)
            self.backward = self.optimizer.backward if is_fused else lambda loss: loss.backward()

    def run(self) -> None:
        loss = self.model(self.inputs).square().mean()
        begun = time.thread_time()
        self.backward(loss)
        self.times.append(time.thread_time() - begun)
        if self.optimizer is not None:
            begun = time.thread_time()
            self.optimizer.step()
            self.step_times.append(time.thread_time() - begun)
            self.optimizer.zero_grad()
        else:
            self.model.zero_grad()


def compare(names: list[str], width: int, layers: int, rounds: int) -> dict[str, dict[str, float]]:
    contestants = {name: Contestant(name, width, layers) for name in names}
    for contestant in contestants.values():
        contestant.run()  # hooks are put on, bases are found
        contestant.times.clear()
        contestant.step_times.clear()
    order = list(contestants.values())
    for number in range(rounds):
        first = number % len(order)  # another one each round
        for contestant in order[first:] + order[:first]:
            contestant.run()
    plain = contestants["plain"].times
    found: dict[str, dict[str, float]] = {}
    print(f"{2 * layers} tensors, {layers} matrices of {width} x {width}; {rounds} rounds")
    print(f"  {'':40}{'backward':>12}{'ratio':>8}{'of rounds':>16}{'step':>12}")
    for name, contestant in contestants.items():
        ratios = [mine / other for mine, other in zip(contestant.times, plain, strict=True)]
        goal = f"   at most {GOALS[name]:g}" if name in GOALS else ""
        step = f"{statistics.median(contestant.step_times) * 1e3:.2f} ms" if contestant.step_times else ""
        found[name] = {
            "backward_s": statistics.median(contestant.times),
            "ratio": statistics.median(ratios),
            "ratio_min": min(ratios),
            "ratio_max": max(ratios),
        }
        print(
            f"  {name:40}{statistics.median(contestant.times) * 1e3:9.2f} ms{statistics.median(ratios):8.2f}"
            f"{f'{min(ratios):.2f} - {max(ratios):.2f}':>16}{step:>12}{goal}",
            flush=True,
        )
    print()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20, help="backward passes of each (default 20)")
    parser.add_argument("--layers", type=int, default=400, help="of two tensors each (default 400)")
    parser.add_argument("--width", type=int, nargs="+", default=[16, 64], help="of a layer (default 16 64)")
    parser.add_argument("--without-upstream", action="store_true", help="without galore-torch and lomo-optim")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    names = ["plain", *OURS, *(() if options.without_upstream else BESIDE)]
    found = {f"width {width}": compare(names, width, options.layers, options.rounds) for width in options.width}
    write_json(options.json, {"layers": options.layers, "rounds": options.rounds, "goals": GOALS, **found})


if __name__ == "__main__":
    main()
