"""Train a new head at a learning rate of its own."""

from __future__ import annotations

from typing import Any

import torch

from tr_all import Trainer


class HeadRateTrainer(Trainer):
    """A Trainer that can give the head of a model of transformers another learning rate than the pretrained rest.

    A new head starts from small random weights, and at the small rate that pretrained weights can bear it takes
    hundreds of steps before it tells rare classes apart. The schedule scales both rates alike.

    Args:
        *args: as for `Trainer`.
        head_learning_rate: peak rate of the head, which is all that is not in the model's `base_model`; None is that
            of the rest.
        **kwargs: as for `Trainer`.
    """

    def __init__(self, *args: Any, head_learning_rate: float | None = None, **kwargs: Any) -> None:
        self.head_learning_rate = head_learning_rate
        super().__init__(*args, **kwargs)

    def create_optimizer(self, model: torch.nn.Module | None = None) -> torch.optim.Optimizer:
        """Build the optimizer, with the head's parameters in groups of their own."""
        if self.optimizer is None and self.head_learning_rate is not None:
            optimizer = super().create_optimizer(model)
            whole: Any = self.model if model is None else model  # one of transformers
            pretrained = {id(parameter) for parameter in whole.base_model.parameters()}
            for group in list(optimizer.param_groups):
                head = [parameter for parameter in group["params"] if id(parameter) not in pretrained]
                group["params"] = [parameter for parameter in group["params"] if id(parameter) in pretrained]
                if head:
                    optimizer.add_param_group({**group, "params": head, "lr": self.head_learning_rate})
        return super().create_optimizer(model)
