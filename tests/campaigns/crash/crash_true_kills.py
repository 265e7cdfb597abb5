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

from children import LIMIT_S
from crash_session import Session
from runner import WRONG_END, Case, Tally

KILLS = 10
EPOCHS_A_KILL = 10

SCRIPT = """
import json, sys, time
sys.path[:] = {path!r}
import torch
torch.set_num_threads(1)
from pathlib import Path
import crash_training
crash_training.watch(lambda place, step: print("reached", flush=True) if place == "at a step's beginning" else None)
end = crash_training.train(Path({run!r}), num_train_epochs={epochs}, asynchronous={asynchronous})
print(json.dumps({{"end": end}}), flush=True)
"""


def true_kills(session: Session) -> Iterator[Case]:
    """Yield a run of its own program that is killed ten times at random, and compared with one left alone."""
    yield Case("kill -9 at random", lambda folder: _until_it_ends(session, folder))


def _until_it_ends(session: Session, folder: Path) -> Tally:
    kills = 2 if session.quick else KILLS
    epochs = EPOCHS_A_KILL * kills
    expected, took_s = _Program(folder / "alone", epochs).wait_for_end()
    chance = random.Random(0)
    tally = Tally()
    for start in range(kills):
        # Each start saves the other way.
        program = _Program(folder / "run", epochs, asynchronous=bool(start % 2))
        # Late enough to come forward, early enough to be killed so many times.
        if not program.kill_after(took_s * chance.uniform(0.3, 1.2) / kills):
            break
        tally.tried += 1
    end, _ = _Program(folder / "run", epochs).wait_for_end()
    if end != expected or len(end) != len(session.end):
        tally.wrong(WRONG_END, f"it ends with {end}, not with {expected}")
    if tally.tried < kills // 2:
        tally.wrong(WRONG_END, f"it ended after {tally.tried} kills; more were meant")
    return tally


class _Program:
    def __init__(self, run: Path, epochs: int, *, asynchronous: bool = False) -> None:
        code = SCRIPT.format(path=sys.path, run=str(run), epochs=epochs, asynchronous=asynchronous)
        self.process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def wait_for_end(self) -> tuple[str, float]:
        """Return the digest of the end, or what it said last, and the seconds from the first step to it."""
        begun, end, printed = 0.0, "", ""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line == "reached\n":
                begun = begun or time.monotonic()
            elif line.startswith('{"end"'):
                end = json.loads(line)["end"]
            printed = line
        self.process.wait(LIMIT_S)
        return end or f"no digest but {printed!r}", time.monotonic() - begun

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
