import parts
from torch import nn


def loss(outputs, labels, num_items_in_batch=None):
    return nn.functional.cross_entropy(outputs["logits"], labels, reduction="sum")


parts.train(compute_loss_func=loss)
