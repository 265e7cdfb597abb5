"""Runs that stop after some steps, and go on with other arguments."""

import pytest
from shared.callbacks import Stop, StopAt
from shared.data import rows
from torch import nn

from tr_core import Trainer, TrainerCallback, TrainingArguments, set_seed


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.GELU())
        self.head = nn.Linear(16, 3)

    def forward(self, x, labels=None):
        logits = self.head(self.encoder(x))
        loss = {} if labels is None else {"loss": nn.functional.cross_entropy(logits, labels)}
        return {**loss, "logits": logits}


class Rates(TrainerCallback):
    """Notes the learning rate of every step, by the step."""

    def __init__(self):
        self.used = {}

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        self.used[state.global_step] = kwargs["optimizer"].param_groups[0]["lr"]


def build(folder, callbacks=(), data=None, kind=Trainer, network=Network, optimizers=(None, None), **changes):
    set_seed(7)
    options = {
        "per_device_train_batch_size": 4,
        "num_train_epochs": 2,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_steps": 100,
        "disable_tqdm": True,
        "log_level": "info",
        "use_cpu": True,
    }
    args = TrainingArguments(output_dir=str(folder), **{**options, **changes})
    model = network()
    made = optimizers(model) if callable(optimizers) else optimizers
    return kind(
        model,
        args,
        train_dataset=rows(40) if data is None else data,
        eval_dataset=rows(9, 1),
        callbacks=list(callbacks),
        optimizers=made,
    )


def save(folder, step, **options):
    """Train, stop after `step` steps, and leave their checkpoint."""
    with pytest.raises(Stop):
        build(folder, [StopAt(step)], **{"save_steps": step, **options}).train()


def resume(folder, step=None, **options):
    """Go on, and return the Trainer and the learning rates of its steps."""
    rates = Rates()
    trainer = build(folder, [rates], **options)
    trainer.train(resume_from_checkpoint=True if step is None else str(folder / f"checkpoint-{step}"))
    return trainer, rates.used
