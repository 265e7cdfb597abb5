"""Refuse gradients that come in several parts, of which a replica would average the first alone."""

from __future__ import annotations

import torch
from torch import nn


class GradientParts:
    """Looks in one backward pass whether a parameter's gradient comes in several parts.

    Under reentrant activation checkpointing every segment has a backward pass of its own, and a weight that several
    segments use gets a part of its gradient from each. torch's DistributedDataParallel takes the first part for all of
    it. It raises where it notices, which it does not where the last part comes after all other gradients, as that of an
    embedding whose weight a segment reads out with. Then each rank keeps its own rest, and replicas go apart.

    Args:
        parameters: those whose gradients are averaged.
    """

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self._parameters = parameters
        self._seen: set[int] = set()
        self._names: dict[int, str] = {}
        self._handles: list[torch.utils.hooks.RemovableHandle] = []

    def begin(self, module: nn.Module) -> None:
        """Count from now on, and raise RuntimeError where a gradient has a second part."""
        self._names = {id(p): name for name, p in module.named_parameters()}
        self._seen.clear()
        if not self._handles:
            self._handles = [p.register_post_accumulate_grad_hook(self._see) for p in self._parameters]

    def end(self) -> None:
        """Count no more."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _see(self, parameter: torch.Tensor) -> None:
        if id(parameter) in self._seen:
            self.end()
            raise RuntimeError(
                f"the gradient of {self._names.get(id(parameter))} comes in several parts in one backward pass, as of "
                "a weight that several segments use under reentrant activation checkpointing; its average over the "
                "ranks would be that of the first part. Set use_reentrant=False "
                "(activation_checkpointing_kwargs={'use_reentrant': False}), or static_graph=True "
                "(--ddp_static_graph true), with which averages wait for all parts"
            )
        self._seen.add(id(parameter))
