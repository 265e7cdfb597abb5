"""The run that is broken in every way: small, and everything that a run can hold takes part in it.

Dropout, a random collator, AdamW, a schedule, evaluations, a best step, a callback with a state, companion files in a
subfolder. Eight steps in two passes; a save at every second one.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tr_core import Trainer, TrainerCallback, TrainingArguments, set_seed

STEPS = 8
TIMINGS = ("_runtime", "_per_second")

# What is called wherever the run could be stopped, with the name of the place and the step, where it is known.
_watcher: Callable[[str, int], None] | None = None

SAVED = "in on_save"
COMPLETE = "when a checkpoint is complete"
NEW_BASIS = "after a step that found a basis"


def watch(watcher: Callable[[str, int], None] | None) -> None:
    """Have `watcher` called with the name of each place that the run reaches, in whatever thread."""
    global _watcher
    _watcher = watcher


def reach(place: str, step: int = 0) -> None:
    if _watcher is not None:
        _watcher(place, step)


class Network(nn.Module):
    """Two layers with dropout between them; tells where it is."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.dropout = nn.Dropout(0.3)
        self.second = nn.Linear(6, 3, bias=False)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.dropout(self.first(x).tanh())
        reach("in the forward" if self.training else "in the evaluation")
        if hidden.requires_grad:
            hidden.register_hook(lambda gradient: reach("in the backward"))
        logits = self.second(hidden)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class Places(TrainerCallback):
    """Tells where the loop is."""

    def __init__(self) -> None:
        self.bases = ""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        reach("at the run's beginning")
        self.bases = bases_of(kwargs["optimizer"])

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        reach("at the run's end")

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        reach("at an epoch's beginning")

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        reach("at a step's beginning")

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        reach("before the optimizer's step")

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        reach("after the optimizer's step")
        before, self.bases = self.bases, bases_of(kwargs["optimizer"])
        if self.bases != before:
            reach(NEW_BASIS)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        reach("at a step's end")

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        reach("in the log")

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        reach("after the evaluation")

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        reach(SAVED, state.global_step)

    def on_checkpoint(self, folder: Path, step: int) -> None:
        reach(COMPLETE, step)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        reach("at an epoch's end")


class EvaluatesByCount(TrainerCallback):
    """Asks for an evaluation at every third step that it has counted: without its state back, at other steps."""

    def __init__(self) -> None:
        self.count = 0

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> dict[str, bool] | None:
        self.count += 1
        return {"should_evaluate": True} if self.count % 3 == 0 else None

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


class Vocabulary:
    """Stands for a tokenizer that keeps its files in a folder of its own."""

    def save_pretrained(self, folder: str) -> None:
        place = Path(folder) / "vocabulary"
        place.mkdir(exist_ok=True)
        (place / "words.txt").write_text("one\ntwo\n")


def rows(number: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [{"x": torch.randn(4, generator=generator), "labels": torch.tensor(i % 3)} for i in range(number)]


def collate_at_random(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Draw from two generators, as masking and augmentation do."""
    features = torch.stack([sample["x"] for sample in samples])
    features = features + torch.randn_like(features) * random.random()
    return {"x": features, "labels": torch.stack([sample["labels"] for sample in samples])}


def build(folder: Path, *, asynchronous: bool = False, **changes: Any) -> Trainer:
    """Return the trainer of the run that saves to `folder`."""
    set_seed(7)
    options = {
        "per_device_train_batch_size": 4,
        "num_train_epochs": 2,
        "learning_rate": 1e-2,
        "warmup_steps": 2,
        "logging_steps": 3,
        "save_steps": 2,
        "save_total_limit": 2,
        "save_async": asynchronous,
        "metric_for_best_model": "loss",
        "logging_first_step": True,
        "disable_tqdm": True,
        "log_level": "error",
        "use_cpu": True,
    }
    return Trainer(
        Network(),
        TrainingArguments(output_dir=str(folder), **{**options, **changes}),
        train_dataset=rows(14),  # the fourth step of a pass has two samples
        eval_dataset=rows(5),
        data_collator=collate_at_random,
        processing_class=Vocabulary(),
        callbacks=[EvaluatesByCount(), Places()],
    )


def train(folder: Path, *, resume: str = "auto", asynchronous: bool = False, **changes: Any) -> str:
    """Train to the end, from the newest checkpoint if there is one, and return the digest of the end."""
    trainer = build(folder, asynchronous=asynchronous, **changes)
    trainer.train(resume_from_checkpoint=resume)
    return digest_end(trainer)


def digest_end(trainer: Trainer) -> str:
    """Return a digest of weights, optimizer state, what was logged of the steps, and which step was best.

    Left out: times, and the summary that `train` logs last, which is of that call alone.
    """
    state = trainer.state
    history = [entry for entry in state.log_history if "train_loss" not in entry]
    return digest(
        {
            "weights": dict(trainer.model.state_dict()),
            "optimizer": trainer.optimizer.state_dict() if trainer.optimizer else None,
            "history": history,
            "step": state.global_step,
            "epoch": state.epoch,
            "best": [state.best_global_step, state.best_metric],
        }
    )


def digest(value: Any) -> str:
    """Return the SHA-256 of a nested state, of every bit of its tensors; times and the place of the folder left out."""
    found = hashlib.sha256()
    _feed(found, value)
    return found.hexdigest()


def _feed(found: Any, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        found.update(f"{value.dtype}{tuple(value.shape)}".encode())
        found.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(value, Mapping):
        for key, item in sorted(value.items(), key=lambda item: repr(item[0])):
            if str(key).endswith(TIMINGS):
                continue
            found.update(f"{{{key!r}:".encode())
            _feed(found, os.path.basename(item) if key == "best_model_checkpoint" and item else item)
    elif isinstance(value, list | tuple):
        found.update(f"{type(value).__name__}{len(value)}".encode())
        for item in value:
            _feed(found, item)
    else:
        found.update(json.dumps(value, default=repr).encode())


def bases_of(optimizer: Any) -> str:
    """Return a digest of what an optimizer projects on, which changes where it finds it anew; empty if it does not."""
    states = optimizer.state_dict()["state"].values()
    bases = [value for state in states for name, value in sorted(state.items()) if name.startswith("basis")]
    return digest(bases) if bases else ""


class Held:
    """A part that takes whatever state a checkpoint has for it."""

    def __init__(self, **state: Any) -> None:
        self.state: dict[str, Any] = state

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def held(names: Iterable[str]) -> dict[str, Held]:
    return {name: Held() for name in names}


PARTS = ("model", "optimizer", "scheduler", "rng", "run", "callbacks", "trainer_state")
