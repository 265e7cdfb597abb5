"""Notice gradients that come in several parts, of which a replica would average the first alone."""

from __future__ import annotations

from collections import Counter

import torch
from torch import nn


class GradientParts:
    """Counts, in one backward pass, how often each parameter's gradient is added to.

    Under reentrant activation checkpointing every segment has a backward pass of its own, and a weight that several
    segments use gets a part of its gradient from each. torch's DistributedDataParallel takes the first part for all of
    it. It raises where it notices, which it does not where the last part comes after all other gradients: a head in a
    segment that is tied to the embedding. Then every rank keeps the rest of its own gradient, and replicas go apart.

    Args:
        parameters: those whose gradients are averaged.
    """

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self._parameters = parameters
        self._counts: Counter[int] = Counter()
        self._handles: list[torch.utils.hooks.RemovableHandle] = []

    def begin(self) -> None:
        """Count from now on."""
        self._counts.clear()
        if not self._handles:
            self._handles = [p.register_post_accumulate_grad_hook(self._count) for p in self._parameters]

    def refuse_several(self, module: nn.Module) -> None:
        """Stop counting.

        Raises:
            RuntimeError: a gradient came in several parts.
        """
        for handle in self._handles:
            handle.remove()
        self._handles = []
        several = [name for name, p in module.named_parameters() if self._counts[id(p)] > 1]
        if several:
            raise RuntimeError(
                f"the gradient of {several[0]}{f' and {len(several) - 1} more' if several[1:] else ''} came in several "
                "parts in one backward pass, as of a weight that several segments use under reentrant activation "
                "checkpointing; its average over the ranks would be that of the first part. Set use_reentrant=False "
                "(activation_checkpointing_kwargs={'use_reentrant': False}), or static_graph=True "
                "(--ddp_static_graph true), with which averages wait for all parts"
            )

    def _count(self, parameter: torch.Tensor) -> None:
        self._counts[id(parameter)] += 1
