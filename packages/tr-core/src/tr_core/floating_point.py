"""Count the floating-point operations of training, where a model lets them be counted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn


class FlopCounter:
    """Reckon 6 operations per parameter and input element: two for the forward, four for the backward.

    Embeddings do not count. Models that do not say how many parameters they have, and which input is theirs
    (`num_parameters`, `main_input_name`), count as 0.

    Source: Kaplan et al. 2020, arXiv:2001.08361, section 2.1.

    Args:
        model: the model that is trained.
    """

    def __init__(self, model: nn.Module) -> None:
        self._input_name: str | None = getattr(model, "main_input_name", None)
        count = getattr(model, "num_parameters", None)
        # Counted once: walking the parameters in every micro-batch costs milliseconds.
        tells = self._input_name is not None and callable(count)
        self._per_element: int = 6 * cast("Callable[..., int]", count)(exclude_embeddings=True) if tells else 0

    @property
    def knows(self) -> bool:
        """Whether the model tells what is needed to count."""
        return self._per_element > 0

    def count(self, inputs: Any) -> int:
        """Return the operations for forward and backward of one batch, from shapes alone."""
        if not self._per_element or self._input_name not in inputs:
            return 0
        main = inputs[self._input_name]
        return self._per_element * main.numel() if isinstance(main, torch.Tensor) else 0
