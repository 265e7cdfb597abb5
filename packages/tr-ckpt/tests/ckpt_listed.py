"""A folder of checkpoints for the tests of `trainer ckpt`, and what else may lie in one."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tr_ckpt import Checkpointer


class State:
    """A part with the state it was given."""

    def __init__(self, **state: Any) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.state = state_dict


def model(number: float = 0.0, **more: Any) -> State:
    return State(**{"weight": torch.full((3, 4), number), "bias": torch.arange(4.0), **more})


def trainer_state(step: int, best: int | None = None, losses: dict[int, float] | None = None) -> State:
    history = [
        {"step": at, "eval_loss": loss, "eval_runtime": 0.5} for at, loss in (losses or {}).items() if at <= step
    ]
    return State(global_step=step, best_global_step=best, best_metric=None, log_history=history)


def save(directory: Path, step: int, *, best: int | None = None, losses: dict[int, float] | None = None) -> Path:
    """Save a checkpoint as a trainer does: a model, a schedule, the trainer's state, and a configuration."""
    return Checkpointer(directory).save(
        step,
        {
            "model": model(float(step)),
            "scheduler": State(last_epoch=step, base_lrs=[0.1]),
            "trainer_state": trainer_state(step, best, losses),
        },
        write_extra=lambda folder: (folder / "config.json").write_text('{"dtype": "float32", "layers": 2}'),
    )


def foreign(directory: Path, step: int, **state: Any) -> Path:
    """Make what another trainer leaves: no manifest, a state, and pickles."""
    folder = directory / f"checkpoint-{step}"
    folder.mkdir(parents=True)
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": step, "log_history": [], **state}))
    (folder / "optimizer.pt").write_bytes(b"x" * 1000)
    return folder


def flip(path: Path, at: int = -1) -> None:
    """Change one bit of a file."""
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def rewritten(folder: Path, drop: Sequence[str] = (), **changes: Any) -> None:
    """Write a manifest that is whole but says something else."""
    content = json.loads((folder / "manifest.json").read_text()) | changes
    content = {name: value for name, value in content.items() if name not in drop}
    content["manifest_sha256"] = "0" * 64
    text = json.dumps(content, indent=2)
    own = hashlib.sha256(text.encode()).hexdigest()
    (folder / "manifest.json").write_text(text.replace(f'"{"0" * 64}"', f'"{own}"', 1))
