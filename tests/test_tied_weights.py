"""A plain module of which two layers share a weight: trained, saved, loaded and resumed."""

import shutil

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F

from tr_all import Trainer, TrainingArguments

ROWS = torch.randint(0, 30, (24, 6), generator=torch.Generator().manual_seed(0))


class Tied(nn.Module):
    """A language model of two layers, whose head is its embedding."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(30, 16)
        self.hidden = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.1), nn.Tanh())
        self.head = nn.Linear(16, 30, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens, labels=None):
        logits = self.head(self.hidden(self.embedding(tokens)))
        if labels is None:
            return {"logits": logits}
        return {"loss": F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()), "logits": logits}


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Tied()


def train(model, folder, resume=None, **options):
    args = TrainingArguments(
        str(folder),
        num_train_epochs=2,
        save_strategy="epoch",
        learning_rate=1e-2,
        weight_decay=0.1,
        per_device_train_batch_size=4,
        use_cpu=True,
        disable_tqdm=True,
        log_level="error",
        **options,
    )
    rows = [{"tokens": row, "labels": row} for row in ROWS]
    trainer = Trainer(model, args, train_dataset=rows, eval_dataset=rows)
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model()
    return trainer


def load(folder):
    """Load saved weights into a new module, as its user does: the tied one has one name in the file."""
    torch.manual_seed(7)
    model = Tied()
    missing, unexpected = model.load_state_dict(load_file(folder / "model.safetensors"), strict=False)
    assert (missing, unexpected) == (["head.weight"], [])
    return model


@torch.no_grad()
def logits(model):
    return model.eval()(ROWS)["logits"]


def test_it_learns_and_stays_tied(model, tmp_path):
    before = logits(model)
    trainer = train(model, tmp_path / "out")
    assert not torch.allclose(logits(model), before, atol=1e-2)
    assert model.head.weight is model.embedding.weight
    groups = trainer.optimizer.param_groups
    assert sum(weight is model.head.weight for group in groups for weight in group["params"]) == 1


def test_the_saved_file_holds_the_shared_weight_once_and_gives_the_same_logits(model, tmp_path):
    train(model, tmp_path / "out")
    assert list(load_file(tmp_path / "out/model.safetensors")) == [
        "embedding.weight",
        "hidden.0.bias",
        "hidden.0.weight",
    ]
    loaded = load(tmp_path / "out")
    assert loaded.head.weight is loaded.embedding.weight
    assert torch.equal(logits(loaded), logits(model))


def test_a_checkpoint_loads_like_the_saved_model(model, tmp_path):
    train(model, tmp_path / "out")
    assert torch.equal(logits(load(tmp_path / "out/checkpoint-12")), logits(model))


def test_a_resumed_run_ends_with_the_same_weights_and_is_tied(model, tmp_path):
    train(model, tmp_path / "out")
    shutil.rmtree(tmp_path / "out/checkpoint-12")
    torch.manual_seed(5)
    other = Tied()
    train(other, tmp_path / "out", resume=True)
    assert other.head.weight is other.embedding.weight
    assert torch.equal(logits(other), logits(model))


def test_the_best_weights_are_loaded_into_both_layers(model, tmp_path):
    options = {"eval_strategy": "epoch", "load_best_model_at_end": True, "metric_for_best_model": "loss"}
    trainer = train(model, tmp_path / "out", greater_is_better=True, **options)  # so that the first are the best
    assert trainer.state.best_global_step == 6
    assert model.head.weight is model.embedding.weight
    assert torch.equal(logits(load(tmp_path / "out/checkpoint-6")), logits(model))
    assert not torch.equal(logits(load(tmp_path / "out/checkpoint-12")), logits(model))
