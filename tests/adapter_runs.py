"""Runs of optimizers of other libraries in a Trainer: what `tests/parity` and `tests/kernels` compare."""

import torch
from shared.results import weights
from torch import nn

from tr_core import Trainer, TrainingArguments

STEPS = 6


class Network(nn.Module):
    """A classifier with an embedding, a norm, dropout, and matrices, of which one is large enough for 8 bits."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(80, 64)
        self.layers = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.2), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 5))

    def forward(self, tokens, labels):
        logits = self.layers(self.embedding(tokens).mean(dim=1))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def rows(number=40):
    generator = torch.Generator().manual_seed(0)
    return [
        {"tokens": torch.randint(80, (5,), generator=generator), "labels": torch.tensor(i % 5)} for i in range(number)
    ]


def trainer_of(folder, *, callbacks=(), model=None, **options):
    """Return a Trainer of a short run."""
    options = {
        "per_device_train_batch_size": 4,
        "max_steps": STEPS,
        "learning_rate": 1e-2,
        "weight_decay": 0.1,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        **options,
    }
    args = TrainingArguments(output_dir=str(folder), **options)
    return Trainer(model or Network(), args, train_dataset=rows(), callbacks=list(callbacks))


def train(folder, *, resume=None, **options):
    trainer = trainer_of(folder, **options)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def check_resume_at_every_step(folder, **options):
    """Train, go on from each of the checkpoints that the run leaves, and require the same weights and state."""
    whole = train(folder / "whole", save_strategy="steps", save_steps=1, **options)
    for step in range(1, STEPS):
        resumed = train(folder / f"from {step}", resume=str(folder / "whole" / f"checkpoint-{step}"), **options)
        assert resumed.state.global_step == STEPS
        assert torch.equal(weights(resumed), weights(whole)), f"resumed at step {step}"
        check_same_tensors(resumed.optimizer.state_dict()["state"], whole.optimizer.state_dict()["state"])
    return whole


def check_same_tensors(first, second):
    """Require two states to hold the same tensors, and nothing but tensors."""
    assert first.keys() == second.keys()
    for number, state in first.items():
        assert state.keys() == second[number].keys()
        for name, value in state.items():
            assert type(value) is torch.Tensor
            assert torch.equal(value, second[number][name]), name


def train_in_shards(folder, options):
    """Train as one of several ranks that divide each parameter among them."""
    train(folder, strategy="fsdp", **options)
