"""Models of every kind of loss and output, and data for them."""

from dataclasses import dataclass

import torch
from torch import nn


def samples(number, seed=0):
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(number, 8, generator=generator)
    return [{"x": row, "labels": (row.sum() > 0).long() + (row[0] > 1).long()} for row in features]


class Base(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, 3))


class Classifier(Base):
    """Returns a dict with the loss, as models of transformers do."""

    def forward(self, x, labels=None):
        logits = self.layers(x)
        if labels is None:
            return {"logits": logits}
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class IgnoresCount(Base):
    """Takes anything by keyword, says it may be given a count, and returns a mean all the same."""

    accepts_loss_kwargs = True

    def forward(self, x, labels=None, **kwargs):
        logits = self.layers(x)
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return {"logits": logits} if loss is None else {"loss": loss, "logits": logits}


class CountedSum(Base):
    """Divides a summed loss by the count, where it is given one."""

    def forward(self, x, labels=None, num_items_in_batch=None):
        logits = self.layers(x)
        if num_items_in_batch is None:
            loss = nn.functional.cross_entropy(logits, labels)
        else:
            loss = nn.functional.cross_entropy(logits, labels, reduction="sum") / num_items_in_batch
        return {"loss": loss, "logits": logits}


class ReturnsTuple(Base):
    def forward(self, x, labels=None):
        logits = self.layers(x)
        return (nn.functional.cross_entropy(logits, labels), logits) if labels is not None else (logits,)


@dataclass
class Output:
    loss: torch.Tensor | None
    logits: torch.Tensor


class ReturnsDataclass(Base):
    def forward(self, x, labels=None):
        logits = self.layers(x)
        return Output(None if labels is None else nn.functional.cross_entropy(logits, labels), logits)
