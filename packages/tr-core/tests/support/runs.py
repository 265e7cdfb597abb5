"""Runs that are interrupted and resumed, and what is read of a run when it has ended."""

import signal

import pytest
import torch
from torch import nn

from support.checkpointer import MemoryCheckpointer
from support.data import samples, stack
from support.models import Classifier
from tr_core import SingleDevice, Trainer
from tr_core.preemption.signals import SIGNALS, Interrupted

TORCH = torch.__version__  # compares with tuples of numbers


def log_of(trainer, name):
    """Return the values of a name in the log, in order."""
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def steps_with(trainer, name):
    """Return the steps whose entries in the log have a name."""
    return [entry["step"] for entry in trainer.state.log_history if name in entry]


class ScaledDevice(SingleDevice):
    """A CPU with a loss scaler, as GPUs have under float16: torch's scaler works there."""

    def __init__(self, scale=1024.0):
        super().__init__("cpu")
        self._scaler = torch.amp.GradScaler("cpu", init_scale=scale)

    @property
    def scale(self):
        return self._scaler.get_scale()


def accuracy(prediction):
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def train_by_hand(model, optimizer, rows, schedule=None, max_norm=1.0):
    """Train one epoch of rows in their order, four a step; return the gradient norms of the model before clipping."""
    model.train()
    norms = []
    for start in range(0, len(rows), 4):
        model.zero_grad()
        model(**stack(rows[start : start + 4]))["loss"].backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), max_norm).item())
        optimizer.step()
        if schedule is not None:
            schedule.step()
    return norms


def assert_same_weights(one, other):
    for mine, theirs in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def first_gradient(make_trainer, model, accumulation, batch_size, trainer_class=Trainer, **parts):
    """Return the gradient of the first step as the optimizer sees it, with the loss that was logged for it."""
    seen = {}

    class Keep(nn.Module):
        def on_pre_optimizer_step(self, args, state, control, model, **kwargs):
            seen.setdefault("grads", [p.grad.clone() for p in model.parameters()])

    torch.manual_seed(3)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.reset_parameters()
    trainer = make_trainer(
        8,
        trainer_class,
        model=model,
        callbacks=[Keep()],
        gradient_accumulation_steps=accumulation,
        per_device_train_batch_size=batch_size,
        max_grad_norm=0.0,
        **parts,
    )
    trainer.train()
    return seen["grads"], trainer.state.log_history[0]["loss"]


def saving_trainer(make_trainer, folder, *callbacks, checkpointer=None, **changes):
    """Build a Trainer of ten steps that keeps its checkpoints in memory."""
    torch.manual_seed(0)
    options = {
        "model": Classifier(),
        "save_strategy": "steps",
        "save_steps": 100,
        "logging_steps": 3,
        "eval_dataset": samples(12),
        "per_device_eval_batch_size": 4,
    }
    return make_trainer(
        40,
        callbacks=list(callbacks),
        checkpointer=MemoryCheckpointer(folder) if checkpointer is None else checkpointer,
        **{**options, **changes},
    )


def interrupt(trainer, kind=Interrupted, **how):
    with pytest.raises(kind) as caught:
        trainer.train(**how)
    return caught.value


def handlers():
    return [signal.getsignal(number) for number in SIGNALS]


def weights(trainer):
    return [value.clone() for value in trainer.model.state_dict().values()]


def assert_ends_alike(one, other):
    for mine, theirs in zip(weights(one), weights(other), strict=True):
        assert torch.equal(mine, theirs)
    timings = ("runtime", "per_second")
    histories = [
        [
            {name: value for name, value in entry.items() if not name.endswith(timings)}
            for entry in trainer.state.log_history
            if "train_loss" not in entry
        ]
        for trainer in (one, other)
    ]
    assert histories[0] == histories[1]
    assert one.state.best_metric == other.state.best_metric
