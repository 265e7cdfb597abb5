import parts
from torch import nn


def loss(outputs, labels):
    return nn.functional.cross_entropy(outputs["logits"], labels, reduction="none")


parts.train(compute_loss_func=loss)
