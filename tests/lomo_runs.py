"""Runs of LOMO and AdaLomo in a Trainer, alone and in ranks."""

import torch
from torch import nn

from tr_core import Trainer, TrainingArguments, set_seed


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear, self.norm, self.dropout = nn.Linear(width, width), nn.LayerNorm(width), nn.Dropout(0.2)

    def forward(self, hidden):
        return hidden + self.dropout(torch.tanh(self.linear(self.norm(hidden))))


class Network(nn.Module):
    """Layers in a stack, and a weight that is used at both ends."""

    def __init__(self, width=16, dropout=0.2):
        super().__init__()
        self.embedding = nn.Embedding(11, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(3))
        self.head = nn.Linear(width, 11)
        self.head.weight = self.embedding.weight
        for layer in self.layers:
            layer.dropout.p = dropout

    def forward(self, tokens, labels):
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        logits = self.head(hidden.mean(dim=1))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def rows(number=40):
    generator = torch.Generator().manual_seed(0)
    return [
        {"tokens": torch.randint(11, (5,), generator=generator), "labels": torch.tensor(i % 11)} for i in range(number)
    ]


def trainer(
    folder, *, callbacks=(), model=None, dropout=0.2, number=40, optimizers=(None, None), strategy=None, **changes
):
    set_seed(7)
    options = {
        "optim": "lomo",
        "per_device_train_batch_size": 4,
        "num_train_epochs": 2,
        "learning_rate": 0.2,
        "weight_decay": 0.1,
        "warmup_steps": 3,
        "logging_steps": 1,
        "save_strategy": "no",
        "disable_tqdm": True,
        "log_level": "error",
        "use_cpu": True,
        "report_to": "none",
    }
    args = TrainingArguments(output_dir=str(folder), **{**options, **changes})
    return Trainer(
        Network(dropout=dropout) if model is None else model,
        args,
        train_dataset=rows(number),
        callbacks=list(callbacks),
        optimizers=optimizers,
        strategy=strategy,
    )


def trained(folder, **options):
    made = trainer(folder, **options)
    made.train()
    return made


def logged(made, *names):
    return {name: [entry[name] for entry in made.state.log_history if name in entry] for name in names}


def weights_of(made):
    return {name: value.detach().clone() for name, value in made.model.state_dict().items()}


def train_as_rank(folder, options):
    """Train in every rank; return its weights and what it logged."""
    made = trained(folder, **options)
    states = [dict(state) for state in made.optimizer.state.values()]
    return weights_of(made), logged(made, "loss", "grad_norm", "learning_rate"), states
