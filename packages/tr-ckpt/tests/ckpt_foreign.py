"""Train a small model with torch alone, and save it in the files that transformers' Trainer writes."""

from __future__ import annotations

import json
import os
import random
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tr_ckpt import RNGState
from tr_ckpt.hf_import import state_files


class Tied(torch.nn.Module):
    """Two layers that share their weight, and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = torch.nn.Linear(4, 4, bias=False), torch.nn.LayerNorm(4)
        self.last = torch.nn.Linear(4, 4, bias=False)
        self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.dropout(self.norm(self.first(x)), 0.5, train=True))


class Place:
    """The part `run` of a loop, which keeps what it is given."""

    state: Any = None

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def make(kind: str = "adamw") -> dict[str, Any]:
    """Return the parts of a loop."""
    torch.manual_seed(0)
    model = Tied()
    groups = [
        {"params": [model.first.weight], "weight_decay": 0.1},
        {"params": [model.norm.weight, model.norm.bias], "weight_decay": 0.0},
    ]
    optimizer: torch.optim.Optimizer = (
        torch.optim.AdamW(groups, lr=0.1) if kind == "adamw" else torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
    return {"model": model, "optimizer": optimizer, "scheduler": schedule, "rng": RNGState(), "run": Place()}


def train(parts: dict[str, Any], steps: int) -> list[float]:
    """Make steps and return their losses."""
    losses = []
    for _ in range(steps):
        loss = parts["model"](torch.randn(8, 4)).square().mean() + random.random()
        parts["optimizer"].zero_grad()
        loss.backward()
        parts["optimizer"].step()
        parts["scheduler"].step()
        losses.append(loss.item())
    return losses


def random_states() -> dict[str, Any]:
    """Return what the Trainer saves of random states; NumPy's where it is there."""
    states = {"python": random.getstate(), "cpu": torch.get_rng_state()}
    try:
        import numpy as np
    except ImportError:
        return states
    return {**states, "numpy": np.random.get_state()}


def trainer_state(step: int, **changes: Any) -> dict[str, Any]:
    """Return what the Trainer says of its run."""
    return {
        "best_global_step": None,
        "best_metric": None,
        "best_model_checkpoint": None,
        "epoch": step / 10,
        "global_step": step,
        "log_history": [{"loss": 0.5, "step": step}],
        "max_steps": 20,
        "stateful_callbacks": {"TrainerControl": {"args": {"should_save": True}, "attributes": {}}},
        "total_flos": 0,
        "train_batch_size": 8,
        **changes,
    }


def save(folder: Path, step: int, parts: dict[str, Any], **changes: Any) -> Path:
    """Write a checkpoint as the Trainer does; `changes` are of its `trainer_state.json`."""
    folder = folder / f"checkpoint-{step}"
    folder.mkdir(parents=True)
    weights = {name: value for name, value in parts["model"].state_dict().items() if name != "last.weight"}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text('{"model_type": "tied"}')
    torch.save(parts["optimizer"].state_dict(), folder / "optimizer.pt")
    torch.save(parts["scheduler"].state_dict(), folder / "scheduler.pt")
    torch.save(random_states(), folder / "rng_state.pth")
    (folder / "trainer_state.json").write_text(json.dumps(trainer_state(step, **changes)))
    (folder / "training_args.bin").write_bytes(b"never read")
    return folder


class Payload:
    """An object whose pickle makes a folder when it is loaded."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)


class View:
    """A tensor over four numbers of its own, as a file may describe it."""

    def __init__(self, size: tuple[int, ...], stride: tuple[int, ...], offset: int = 0) -> None:
        self.described = (offset, size, stride)

    def __reduce__(self) -> Any:
        storage = torch.zeros(4)._typed_storage()
        return torch._utils._rebuild_tensor_v2, (storage, *self.described, False, OrderedDict())


def read_program(program: bytes, folder: Path) -> Any:
    """Read a pickle as the state of a file of `torch.save`."""
    with zipfile.ZipFile(folder / "x.pt", "w") as archive:
        archive.writestr("x/data.pkl", program)
        archive.writestr("x/version", "3")
    return state_files.read_archive(folder / "x.pt")
