import parts
from torch import nn


class Summing(parts.Classifier):
    def loss(self, logits, labels):
        return nn.functional.cross_entropy(logits, labels, reduction="sum")


parts.train(Summing())
