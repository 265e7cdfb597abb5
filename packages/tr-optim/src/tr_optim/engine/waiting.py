"""Let gradients wait for each other, to be used several at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

Tensors = list[torch.Tensor]
Use = Callable[[Tensors, Tensors, torch.Tensor | None], None]


class PartsWaiting:
    """Parts of gradients, whose statistics over ranks are exchanged together.

    They wait until they are as many numbers as the largest parameter has. That depends on shapes alone, so that all
    ranks exchange the same at the same time, and what waits is no more than what one more gradient takes.

    Args:
        largest: numbers of the largest parameter.
        use: called with parameters, this rank's parts of their gradients, and None.
    """

    def __init__(self, largest: int, use: Use) -> None:
        self._largest, self._use = largest, use
        self._parameters: Tensors = []
        self._gradients: Tensors = []
        self._count = 0

    def add(self, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        """Take this rank's part of a gradient."""
        self._parameters.append(parameter)
        self._gradients.append(gradient)
        self._count += parameter.numel()  # of the whole: the same on all ranks
        if self._count >= self._largest:
            self.finish()

    def finish(self) -> None:
        """Use those that wait."""
        parameters, gradients = self._parameters, self._gradients
        self._parameters, self._gradients, self._count = [], [], 0
        if parameters:
            self._use(parameters, gradients, None)


class SmallWaiting:
    """Small gradients: used by themselves, each would cost as many calls as a large one.

    Args:
        largest: numbers of a gradient that waits, at most; -1 for none.
        at_a_time: gradients that are used together, at most.
        group_of: the groups of parameters, by their ids.
        use: called with parameters of one group, dtype and device, their gradients, and None.
    """

    def __init__(self, largest: int, at_a_time: int, group_of: Mapping[int, Any], use: Use) -> None:
        self.largest = largest
        self._at_a_time, self._group_of, self._use = at_a_time, group_of, use
        self._waiting: list[tuple[torch.Tensor, torch.Tensor]] = []

    def add(self, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        """Take a gradient."""
        self._waiting.append((parameter, gradient))
        if len(self._waiting) == self._at_a_time:
            self.finish()

    def finish(self) -> None:
        """Use those that wait."""
        alike: dict[Any, tuple[Tensors, Tensors]] = {}
        for parameter, gradient in self._waiting:
            kind = (id(self._group_of[id(parameter)]), gradient.dtype, gradient.device)
            parameters, gradients = alike.setdefault(kind, ([], []))
            parameters.append(parameter)
            gradients.append(gradient)
        self._waiting = []
        for parameters, gradients in alike.values():
            self._use(parameters, gradients, None)
