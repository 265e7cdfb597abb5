"""Small models and data that every test of this package shares."""

import pytest
import torch
from torch import nn

from tr_core import Trainer, TrainingArguments


class Classifier(nn.Module):
    """Three classes from eight numbers; returns a dict with the loss, as models of transformers do."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, 3))

    def forward(self, x, labels=None):
        logits = self.layers(x)
        if labels is None:
            return {"logits": logits}
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def samples(number: int, seed: int = 0) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(number, 8, generator=generator)
    return [{"x": row, "labels": (row.sum() > 0).long() + (row[0] > 1).long()} for row in features]


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Classifier()


@pytest.fixture
def make_args(tmp_path):
    def build(**changes):
        options = {
            "output_dir": str(tmp_path / "out"),
            "per_device_train_batch_size": 4,
            "num_train_epochs": 1,
            "logging_steps": 1,
            "save_strategy": "no",
            "disable_tqdm": True,
            "log_level": "error",
            "use_cpu": True,
        }
        return TrainingArguments(**{**options, **changes})

    return build


@pytest.fixture
def make_trainer(make_args, model):
    def build(number=20, trainer_class=Trainer, **changes):
        parts = {
            name: changes.pop(name)
            for name in list(changes)
            if name in Trainer.__init__.__annotations__ or name in ("tokenizer", "callback")
        }
        parts.setdefault("model", model) if "model_init" not in parts else None
        parts.setdefault("train_dataset", samples(number))
        return trainer_class(args=make_args(**changes), **parts)

    return build
