"""What tests save: parts told apart by a number, a small training run, and a folder as a trainer leaves it."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tr_ckpt import Checkpointer, RNGState
from tr_ckpt.folder_lock import NAME


class Values:
    """A state made from one number, so that a mix of two saves cannot go unnoticed."""

    def __init__(self, number: int = 0) -> None:
        self.state: dict[str, Any] = {
            "number": number,
            "tensor": torch.full((7,), float(number)),
            "pair": (number, "x"),
        }

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.state = state_dict

    @property
    def number(self) -> int:
        number = self.state["number"]
        assert torch.equal(self.state["tensor"], torch.full((7,), float(number)))
        assert self.state["pair"] == (number, "x")
        return number


def parts(number: int = 0) -> dict[str, Values]:
    return {"model": Values(number), "extra": Values(number)}


def save_steps(directory: Path, steps: Sequence[int] = (10, 20, 30)) -> Checkpointer:
    """Return what saved checkpoints of these steps."""
    checkpointer = Checkpointer(directory)
    for step in steps:
        checkpointer.save(step, parts(step))
    return checkpointer


def number_of(restored: dict[str, Values]) -> int:
    [number] = {part.number for part in restored.values()}
    return number


def restored(checkpointer: Checkpointer | Path, source: Path | str | None = None) -> tuple[int | None, int]:
    """Return the step and the number of what a restore loads."""
    into = parts()
    checkpointer = checkpointer if isinstance(checkpointer, Checkpointer) else Checkpointer(checkpointer)
    return checkpointer.restore(into, source), number_of(into)


def listed(folder: Path) -> list[str]:
    """Return what is in a folder, sorted, but for its lock, which stays as long as something saves there."""
    return sorted(path.name for path in folder.iterdir() if path.name != NAME)


def decaying(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))


class Run:
    """A small training run with dropout: a model, an optimizer, a schedule, and the random numbers."""

    def __init__(self, optimizer=torch.optim.AdamW, schedule=decaying):
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 2)
        )
        self.optimizer = optimizer(self.model.parameters())
        self.schedule = schedule(self.optimizer)

    def parts(self):
        return {"model": self.model, "optimizer": self.optimizer, "scheduler": self.schedule, "rng": RNGState()}

    def train(self, steps):
        for _ in range(steps):
            batch = torch.randn(16, 4)

            def closure(batch=batch):
                self.optimizer.zero_grad()
                loss = self.model(batch).square().sum()
                loss.backward()
                return loss

            loss = self.optimizer.step(closure)
            plateau = isinstance(self.schedule, torch.optim.lr_scheduler.ReduceLROnPlateau)
            self.schedule.step(*([loss.detach()] if plateau else []))

    def weights(self):
        weights = torch.cat([value.double().reshape(-1) for value in self.model.state_dict().values()])
        assert weights.isfinite().all()
        return weights


class Holding:
    """A part with the state it was given."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state_dict: Any) -> None:
        self.state = state_dict


class State(Holding):
    """A part with entries by name."""

    def __init__(self, **state: Any) -> None:
        super().__init__(state)


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
    (folder / "manifest.json").write_text(sealed(content))


def sealed(content: dict[str, Any]) -> str:
    """Return the text of a manifest with the digest that fits it."""
    text = json.dumps({**content, "manifest_sha256": "0" * 64}, indent=2).replace("Infinity", "1e999")
    own = hashlib.sha256(text.encode()).hexdigest()
    return text.replace(f'"{"0" * 64}"', f'"{own}"', 1)


def same(left: Any, right: Any) -> bool:
    """Whether two states are equal in value and in the type of everything inside."""
    if type(left) is not type(right):
        return False
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and left.shape == right.shape and torch.equal(left, right)
    if isinstance(left, float):
        return math.copysign(1, left) == math.copysign(1, right) and (left == right or left != left)
    if type(left).__name__ == "ndarray":
        return left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()
    return left == right


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8) if tensor.numel() else tensor.reshape(-1)


def of_dtype(dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor of 48 different bytes."""
    raw = torch.arange(48, dtype=torch.uint8)
    return raw.remainder(2).bool() if dtype is torch.bool else raw.view(dtype)
