"""A small training run."""

import torch

from tr_ckpt import RNGState


def decaying(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))


class Run:
    """A small training run with dropout: a model, an optimizer, a schedule, and the random numbers."""

    def __init__(self, optimizer=torch.optim.AdamW, schedule=decaying):
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 2)
        )
        self.optimizer = optimizer(self.model.parameters())
        self.schedule = schedule(self.optimizer)

    def parts(self):
        return {"model": self.model, "optimizer": self.optimizer, "scheduler": self.schedule, "rng": RNGState()}

    def train(self, steps):
        for _ in range(steps):
            batch = torch.randn(16, 4)

            def closure(batch=batch):
                self.optimizer.zero_grad()
                loss = self.model(batch).square().sum()
                loss.backward()
                return loss

            loss = self.optimizer.step(closure)
            plateau = isinstance(self.schedule, torch.optim.lr_scheduler.ReduceLROnPlateau)
            self.schedule.step(*([loss.detach()] if plateau else []))

    def weights(self):
        weights = torch.cat([value.double().reshape(-1) for value in self.model.state_dict().values()])
        assert weights.isfinite().all()
        return weights
