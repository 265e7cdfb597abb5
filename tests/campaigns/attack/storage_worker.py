"""Do attacks on storage that are asked for on stdin, a line of JSON each, and answer each with one.

Started with the disk that fails in it; every run is a fork, so that nothing is imported twice.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import io
import json
import sys
from pathlib import Path
from typing import Any

import torch
from failing_disk import Aim
from storage_stages import STAGES, Attacked, crash_training

torch.set_num_threads(1)
# What runs import when they need it: seconds, which every fork would take.
IMPORTED_LATE = ("torch._dynamo", "torch.distributed", "torch.nn.parallel", "tr_dist.ddp")

attacked: dict[str, Attacked] = {}


def answer(root: Path, asked: dict[str, Any]) -> dict[str, Any]:
    name, of_files = asked["stage"], asked["of_files"]
    key = f"{name}{', operations' if of_files else ''}"
    if key not in attacked:
        folder = root / key.replace(", ", "-").replace(" ", "-")
        attacked[key] = Attacked(STAGES[name], folder, of_files=of_files)
    if "aim" not in asked:
        return {"calls": attacked[key].calls}
    aim = Aim(**{**asked["aim"], "kinds": frozenset(asked["aim"]["kinds"])})
    result = attacked[key].attack(str(asked["number"]), asked["rank"], aim)
    return {"tried": result.tried, "end": result.end, "said": result.said, "problems": result.problems}


def main(root: Path) -> None:
    for module in IMPORTED_LATE:
        importlib.import_module(module)
    with contextlib.redirect_stdout(io.StringIO()):
        crash_training.train(root / "warm")
    gc.collect()
    gc.freeze()  # forks share its memory for longer
    # Without a buffer, which a fork would have with what it holds.
    for line in open(0, "rb", buffering=0, closefd=False):  # noqa: SIM115
        try:
            found = answer(root, json.loads(line))
        except Exception as error:
            found = {"error": f"{type(error).__name__}: {error}"}
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
