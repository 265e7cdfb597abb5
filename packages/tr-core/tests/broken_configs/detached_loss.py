import parts
import torch


class Counting(parts.Classifier):
    def loss(self, logits, labels):
        return torch.tensor(super().loss(logits, labels).item())


parts.train(Counting())
