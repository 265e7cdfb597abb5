"""Kill a process that another program started, from outside, at times that nobody chose."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from crash_process import LIMIT_S
from crash_session import Fault, Session, Tally

KILLS = 10
EPOCHS_A_KILL = 10

SCRIPT = """
import json, sys, time
sys.path.insert(0, {here!r})
import torch
torch.set_num_threads(1)
from pathlib import Path
import crash_training
crash_training.watch(lambda place, step: print("reached", flush=True) if place == "at a step's beginning" else None)
end = crash_training.train(Path({run!r}), num_train_epochs={epochs}, asynchronous={asynchronous})
print(json.dumps({{"end": end}}), flush=True)
"""


def true_kills(session: Session) -> Iterator[Fault]:
    """Yield a run of its own program that is killed ten times at random, and one left alone to compare it with."""
    for asynchronous in (False, True):
        yield Fault(
            f"kill -9 at random, {'asynchronous' if asynchronous else 'synchronous'}",
            lambda folder, asynchronous=asynchronous: _until_it_ends(session, folder, asynchronous),
        )


def _until_it_ends(session: Session, folder: Path, asynchronous: bool) -> Tally:
    kills = 2 if session.quick else KILLS
    epochs = EPOCHS_A_KILL * kills
    alone = _Program(folder / "alone", epochs, asynchronous)
    expected, took_s = alone.wait_for_end()
    chance = random.Random(int(asynchronous))
    tally = Tally()
    for _ in range(kills):
        program = _Program(folder / "run", epochs, asynchronous)
        # Late enough to come forward, early enough to be killed so many times.
        if not program.kill_after(took_s * chance.uniform(0.3, 1.5) / kills):
            break
        tally.faults += 1
        tally.seen["kills"] += 1
    end, _ = _Program(folder / "run", epochs, asynchronous).wait_for_end()
    if not expected or end != expected:
        tally.problems.append(f"it ends with {end[:16]}, not with {expected[:16]}")
    if tally.faults < kills // 2:
        tally.problems.append(f"it ended after {tally.faults} kills; more were meant")
    return tally


class _Program:
    def __init__(self, run: Path, epochs: int, asynchronous: bool) -> None:
        here = str(Path(__file__).parent)
        code = SCRIPT.format(here=here, run=str(run), epochs=epochs, asynchronous=asynchronous)
        self.process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def wait_for_end(self) -> tuple[str, float]:
        """Return the digest of the end, and the seconds from the first step to it."""
        begun, end = 0.0, ""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line == "reached\n":
                begun = begun or time.monotonic()
            elif line.startswith('{"end"'):
                end = json.loads(line)["end"]
        self.process.wait(LIMIT_S)
        return end, time.monotonic() - begun

    def kill_after(self, seconds: float) -> bool:
        """Kill it so long after its first step; False if it ended before."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line == "reached\n":
                break
        time.sleep(seconds)
        self.process.kill()
        self.process.stdout.close()
        return self.process.wait(LIMIT_S) == -signal.SIGKILL
