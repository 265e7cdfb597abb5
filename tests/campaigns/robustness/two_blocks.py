"""A model of two blocks, in whose passes a rank may fail or hang."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def make_network(
    reach: Callable[[str], object], dropout: float = 0.0, seen: Callable[[list[int]], object] = len
) -> Any:
    """Return the model.

    Args:
        reach: called with `forward` or `backward` when a training step is there.
        dropout: after the first block.
        seen: called with the numbers of the rows of a training step, if they have numbers.
    """
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.dense = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(self.dense(x))

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first, self.dropout, self.second = Block(), nn.Dropout(dropout), Block()
            self.head = nn.Linear(8, 3)

        def forward(
            self, x: torch.Tensor, labels: torch.Tensor, number: torch.Tensor | None = None
        ) -> dict[str, torch.Tensor]:
            if self.training:
                if number is not None:
                    seen(number.tolist())
                reach("forward")
            hidden = self.dropout(self.first(x))
            if hidden.requires_grad:  # in the backward the later layers' gradients are under way by then
                hidden.register_hook(lambda gradient: reach("backward"))
            logits = self.head(self.second(hidden))
            return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}

    return Network()
