"""Measure what grows with what: a save with many kept checkpoints, a save, a log and a resume of a run with a long log.

Each line is the processor time of one operation with a small number and with a large one, medians of several. Counts of
files that are read and of bytes that are written stand beside it. Read the ratios.

Run: python packages/tr-ckpt/bench/growth.py [--kept 1000 --entries 1000000 --tensors 20000 --json FILE]
"""

from __future__ import annotations

import argparse
import json
import logging
import platform
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tr_ckpt import Checkpointer, testing
from tr_core import TrainerState
from tr_core.checkpoint.log_files import LogFiles, SavedState

REPEATS = 9


class Counted:
    """Count files opened for reading, and bytes written, of all checkpoints."""

    def __init__(self) -> None:
        self.opened = self.written = 0
        testing.replace_operations(self._counting, ("open_file", "write"))

    def _counting(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def operation(*given: Any) -> Any:
            if name == "write":
                self.written += len(given[1])
            else:
                self.opened += 1
            return original(*given)

        return operation


class Numbers:
    """A small part of a checkpoint."""

    def state_dict(self) -> dict[str, Any]:
        return {"values": torch.zeros(100)}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Take anything."""


def median_s(work: Callable[[], object], repeats: int = REPEATS) -> float:
    taken = []
    for _ in range(repeats):
        begun = time.process_time()
        work()
        taken.append(time.process_time() - begun)
    return statistics.median(taken)


def saves(keeper: Checkpointer, parts: dict[str, Any], counted: Counted, repeats: int = REPEATS) -> dict[str, float]:
    """Save several times and return time, files opened and bytes written of one save."""
    step = max([0, *keeper.steps()])

    def save() -> None:
        nonlocal step
        step += 1
        keeper.save(step, parts)

    save()
    save()
    opened, written = counted.opened, counted.written
    taken = median_s(save, repeats)
    return {
        "cpu_s": taken,
        "files_opened": (counted.opened - opened) / repeats,
        "bytes_written": (counted.written - written) / repeats,
    }


def kept(number: int, above: Path, counted: Counted) -> dict[str, float]:
    keeper = Checkpointer(above / f"kept-{number}")
    for step in range(number):
        keeper.save(step, {"numbers": Numbers()})
    keeper.keep_last = number
    return saves(keeper, {"numbers": Numbers()}, counted)


def entries(number: int, above: Path, counted: Counted) -> dict[str, dict[str, float]]:
    """Return what a save and a resume of a run cost that has logged so many entries."""
    state, files, folder = TrainerState(), LogFiles(), above / f"log-{number}"
    state.log_history = [{"loss": 1 / (n + 1), "grad_norm": 0.5, "epoch": n / 3, "step": n} for n in range(number)]
    keeper = Checkpointer(folder, keep_last=2)

    class State(SavedState):
        def state_dict(self) -> dict[str, Any]:
            state.log_history += [{"loss": 0.5, "step": number}] * 25  # as many are logged between two saves
            files.write(state.log_history, folder / "log_history")
            return super().state_dict()

    saved = saves(keeper, {"trainer_state": State(state, files)}, counted)
    held = files.state_dict()

    def resume() -> None:
        again = TrainerState()
        keeper.restore({"trainer_state": SavedState(again, LogFiles())})
        if held["count"]:
            found = LogFiles()
            found.load_state_dict(held)
            found.read(again, [folder / "log_history"])

    return {"save": saved, "resume": {"cpu_s": median_s(resume, 3)}}


def tensors(number: int, above: Path, counted: Counted) -> dict[str, dict[str, float]]:
    """Return what a save and a resume of a model of so many parameters cost, in blocks of 20, with AdamW."""
    blocks = (nn.ModuleList(nn.Linear(4, 4) for _ in range(10)) for _ in range(number // 20))
    model = nn.ModuleList(nn.ModuleList(pair) for pair in zip(*[iter(blocks)] * 10, strict=False))
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    keeper = Checkpointer(above / f"tensors-{number}", keep_last=2)
    parts: dict[str, Any] = {"model": model, "optimizer": optimizer}
    saved = saves(keeper, parts, counted, 3)
    return {"save": saved, "resume": {"cpu_s": median_s(lambda: keeper.restore(parts), 3)}}


def measure(options: argparse.Namespace, above: Path) -> dict[str, dict[str, Any]]:
    counted, found = Counted(), {}

    def note(name: str, small: int, large: int, work: Callable[[int], dict[str, Any]]) -> None:
        few, many = work(small), work(large)
        if "cpu_s" in few:
            few, many = {"save": few}, {"save": many}
        for what in few:
            title = f"{what}, {name}"
            found[title] = {str(small): few[what], str(large): many[what]}
            ratio = many[what]["cpu_s"] / few[what]["cpu_s"]
            found[title]["ratio"] = ratio
            print(f"{title:28}{small:>9,} {few[what]['cpu_s'] * 1e3:9.1f} ms", end="")
            print(f"{large:>12,} {many[what]['cpu_s'] * 1e3:9.1f} ms  ratio {ratio:7.2f}", end="")
            if "files_opened" in few[what]:
                print(
                    f"; files opened {few[what]['files_opened']:.0f}, {many[what]['files_opened']:.0f}; bytes written "
                    f"{few[what]['bytes_written']:,.0f}, {many[what]['bytes_written']:,.0f}",
                    end="",
                )
            print(flush=True)

    note("kept checkpoints", 15, options.kept, lambda number: kept(number, above, counted))
    note("logged entries", 2_000, options.entries, lambda number: entries(number, above, counted))
    note("parameters", options.tensors // 10, options.tensors, lambda number: tensors(number, above, counted))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kept", type=int, default=1_000)
    parser.add_argument("--entries", type=int, default=1_000_000)
    parser.add_argument("--tensors", type=int, default=20_000)
    parser.add_argument("--directory", default=None, help="where to save; the system's temporary folder")
    parser.add_argument("--json", type=Path, default=None, help="also write the results to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    above = Path(tempfile.mkdtemp(dir=options.directory))
    try:
        found = measure(options, above)
    finally:
        shutil.rmtree(above)
    if options.json is not None:
        about = {
            "benchmark": "growth",
            "torch": torch.__version__,
            "machine": platform.machine(),
        }
        options.json.write_text(json.dumps({**about, "results": found}, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
