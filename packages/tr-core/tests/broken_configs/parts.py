"""What the scripts of this folder are made of: a model, data, arguments that write nothing."""

import torch
from torch import nn

from tr_core import Trainer, TrainingArguments

BATCH, STEPS = 4, 5


def arguments(**changes):
    options = {
        "output_dir": "out",
        "per_device_train_batch_size": BATCH,
        "num_train_epochs": 1,
        "logging_steps": 1,
        "save_strategy": "no",
        "disable_tqdm": True,
        "log_level": "error",
        "use_cpu": True,
    }
    return TrainingArguments(**{**options, **changes})


def rows(number=BATCH * STEPS, classes=3):
    generator = torch.Generator().manual_seed(0)
    return [{"x": torch.randn(8, generator=generator), "labels": index % classes} for index in range(number)]


class Classifier(nn.Module):
    def __init__(self, classes=3):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, classes))

    def forward(self, x, labels=None):
        logits = self.layers(x)
        return {"logits": logits} if labels is None else {"loss": self.loss(logits, labels), "logits": logits}

    def loss(self, logits, labels):
        return nn.functional.cross_entropy(logits, labels)


class Words(nn.Module):
    """Predicts a label for each of the words of a sample; -100 is none."""

    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(50, 8), nn.Linear(8, 4)

    def forward(self, words, labels=None, num_items_in_batch=None):
        logits = self.head(self.words(words))
        if labels is None:
            return {"logits": logits}
        reduction = "mean" if num_items_in_batch is None else "sum"
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction=reduction)
        return {"loss": loss if num_items_in_batch is None else loss / num_items_in_batch, "logits": logits}


def sentences(number=20):
    """Samples of six words, of which 5, 1, 5, 1 ... have a label."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for index in range(number):
        labels = torch.full((6,), -100)
        labels[: 5 - 4 * (index % 2)] = index % 4
        made.append({"words": torch.randint(50, (6,), generator=generator), "labels": labels})
    return made


def accuracy(prediction):
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def train(model=None, trainer_class=Trainer, data=None, **changes):
    parts = {
        name: changes.pop(name)
        for name in (
            "data_collator",
            "eval_dataset",
            "compute_metrics",
            "compute_loss_func",
            "preprocess_logits_for_metrics",
            "optimizers",
        )
        if name in changes
    }
    model, data = Classifier() if model is None else model, rows() if data is None else data
    trainer_class(model, arguments(**changes), train_dataset=data, **parts).train()
    raise AssertionError("trained")
