"""What the scripts of this folder are made of."""

import torch
from torch import nn

from tr_all import Trainer, TrainingArguments


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))

    def forward(self, x, labels=None):
        logits = self.layers(x)
        if labels is None:
            return {"logits": logits}
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def rows(number=16):
    generator = torch.Generator().manual_seed(0)
    return [{"x": torch.randn(8, generator=generator), "labels": index % 3} for index in range(number)]


def train(model=None, data=None, resume=None, **changes):
    options = {
        "output_dir": "new",
        "per_device_train_batch_size": 4,
        "num_train_epochs": 1,
        "logging_steps": 1,
        "save_steps": 2,
        "disable_tqdm": True,
        "use_cpu": True,
    }
    args = TrainingArguments(**{**options, **changes})
    model = Classifier() if model is None else model
    data = rows() if data is None else data
    trainer = Trainer(model, args, train_dataset=data, eval_dataset=data[:6])
    trainer.train(resume_from_checkpoint=resume)
