"""Measure how long a save holds training up: in the background, in the foreground, and with transformers' Trainer.

All save one model and optimizer in one process, in turn, several rounds, to one disk. After a save in the background
the loop trains on, and its steps are compared with steps when nothing is written. Read the ratios: absolute times are
those of this machine now.

Run: nox -s bench -- saving [--rounds 7 --threads 1 --directory /on/the/disk/to/measure]
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tr_ckpt import Checkpointer, RNGState

GOAL = 0.15
MIB = 2**20


class Model(nn.Module):
    """A small language model: 100 M parameters as it is measured."""

    def __init__(self, vocabulary: int, width: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        block = nn.TransformerEncoderLayer(width, 12, 4 * width, dropout=0.1, batch_first=True)
        self.layers = nn.TransformerEncoder(block, layers, enable_nested_tensor=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.layers(self.embedding(tokens))
        logits = hidden @ self.embedding.weight.t()
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())


class Training:
    """A loop as one writes it."""

    def __init__(self, vocabulary: int, width: int, layers: int) -> None:
        torch.manual_seed(0)
        self.model = Model(vocabulary, width, layers)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1 / (1 + step))
        self.vocabulary = vocabulary
        self.step()  # the optimizer has its state from here on

    def step(self) -> float:
        """Make a step and return how long it took, in seconds."""
        begun = time.perf_counter()
        loss = self.model(torch.randint(self.vocabulary, (2, 16)))
        loss.backward()
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        return time.perf_counter() - begun

    def parts(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "scheduler": self.schedule, "rng": RNGState()}

    def state_bytes(self) -> int:
        tensors = list(self.model.state_dict().values())
        tensors += [value for state in self.optimizer.state.values() for value in state.values()]
        return sum(tensor.nbytes for tensor in tensors)


@dataclass
class Measured:
    """What was seen of one way to save, a value a round."""

    blocked_s: list[float] = field(default_factory=list)
    whole_s: list[float] = field(default_factory=list)
    extra_bytes: list[int] = field(default_factory=list)


def resident_bytes(which: str) -> int:
    """Return the memory in use by this process: `VmRSS` now, `VmHWM` at most."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(which))


def measure(measured: Measured, save: Callable[[], object], finish: Callable[[], object]) -> None:
    """Save once: note how long the caller waited, by how much memory grew meanwhile, and when all was written."""
    os.sync()  # what was written before is not a part of this
    Path("/proc/self/clear_refs").write_text("5")  # the highest mark begins again
    before = resident_bytes("VmRSS")
    begun = time.perf_counter()
    save()
    measured.blocked_s.append(time.perf_counter() - begun)
    measured.extra_bytes.append(resident_bytes("VmHWM") - before)
    finish()
    measured.whole_s.append(time.perf_counter() - begun)


def transformers_save(training: Training, directory: Path) -> Callable[[], None]:
    """Return the save of transformers' Trainer, of the same model, optimizer and schedule."""
    from transformers import Trainer, TrainingArguments

    args = TrainingArguments(output_dir=str(directory), report_to=[], use_cpu=True, save_total_limit=1)
    trainer = Trainer(model=training.model, args=args, optimizers=(training.optimizer, training.schedule))

    def save() -> None:
        trainer.state.global_step += 1
        trainer._save_checkpoint(training.model, trial=None)

    return save


def main() -> None:
    options = parse()
    if options.threads:
        torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory(dir=options.directory) as above:
        run(options, Path(above))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=12, help="steps of a round with nothing being written")
    parser.add_argument("--threads", type=int, default=0, help="of torch; 0: as many as it takes by itself")
    parser.add_argument("--directory", default=None, help="where to save; the system's temporary folder")
    parser.add_argument("--small", action="store_true", help="1 M parameters, to try this script")
    parser.add_argument("--without-transformers", action="store_true")
    return parser.parse_args()


def run(options: argparse.Namespace, above: Path) -> None:
    training = Training(1000, 96, 4) if options.small else Training(20_000, 768, 12)
    parameters = sum(p.numel() for p in training.model.parameters())
    print(
        f"{parameters / 1e6:.1f} M parameters, state {training.state_bytes() / 1e9:.2f} GB; torch {torch.__version__}, "
        f"{torch.get_num_threads()} threads, {platform.machine()}, {options.rounds} rounds\n"
    )
    keep = {name: Measured() for name in ("asynchronous", "synchronous", "transformers")}
    steps = {"alone": [], "during": []}
    asynchronous = Checkpointer(above / "asynchronous", keep_last=1, asynchronous=True)
    synchronous = Checkpointer(above / "synchronous", keep_last=1)
    reference = None if options.without_transformers else transformers_save(training, above / "transformers")
    first = Measured()
    number = [0]

    def train_until_written() -> None:
        while asynchronous._background.is_busy():
            steps["during"].append(training.step())
        asynchronous.wait()

    def save(checkpointer: Checkpointer) -> Callable[[], object]:
        number[0] += 1
        return lambda: checkpointer.save(number[0], training.parts())

    measure(first, save(asynchronous), train_until_written)
    steps["during"].clear()
    for _ in range(options.rounds):
        steps["alone"] += [training.step() for _ in range(options.steps)]
        measure(keep["asynchronous"], save(asynchronous), train_until_written)
        measure(keep["synchronous"], save(synchronous), lambda: None)
        if reference is not None:
            measure(keep["transformers"], reference, lambda: None)
    report(keep, first, steps, asynchronous._buffers.held_bytes)
    shutil.rmtree(above, ignore_errors=True)


def report(
    keep: dict[str, Measured],
    first: Measured,
    steps: dict[str, list[float]],
    held_bytes: int,
) -> None:
    base = keep["synchronous"].blocked_s
    print(f"{'':28}{'blocked':>10}{'ratio':>8}{'of rounds':>16}{'until written':>15}{'extra memory':>14}")
    rows = [("asynchronous, first save", first), *((name, measured) for name, measured in keep.items())]
    for name, measured in rows:
        if measured.blocked_s:
            ratios = [mine / other for mine, other in zip(measured.blocked_s, base, strict=False)]
            print(
                f"{name:28}{statistics.median(measured.blocked_s):8.3f} s{median_ratio(measured.blocked_s, base):8.3f}"
                f"{f'{min(ratios):.3f} - {max(ratios):.3f}':>16}{statistics.median(measured.whole_s):13.2f} s"
                f"{max(measured.extra_bytes) / MIB:10.0f} MiB"
            )
    blocked = keep["asynchronous"].blocked_s
    print(
        f"\nan asynchronous save blocks for {median_ratio(blocked, base):.3f} of a synchronous one; the goal is at "
        f"most {GOAL}; it holds {held_bytes / MIB:.0f} MiB from the first on"
    )
    alone, during = (statistics.median(steps[when]) for when in ("alone", "during"))
    lost_s = (statistics.mean(steps["during"]) - statistics.mean(steps["alone"])) * len(steps["during"]) / len(blocked)
    lost = (statistics.median(blocked) + lost_s) / statistics.median(base)
    print(
        f"a step takes {alone:.3f} s with nothing being written, {during:.3f} s during a write "
        f"({during / alone:.2f} times as long);\nblocked time and slower steps together are {lost:.2f} of a "
        "synchronous save"
    )


def median_ratio(values: list[float], base: list[float]) -> float:
    return statistics.median(values) / statistics.median(base)


if __name__ == "__main__":
    main()
