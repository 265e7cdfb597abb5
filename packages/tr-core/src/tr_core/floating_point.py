"""Count the floating-point operations of training, where a model lets them be counted."""

from __future__ import annotations

from typing import Any

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
        self._per_element = 6 * count(exclude_embeddings=True) if self._input_name and callable(count) else 0

    def count(self, inputs: Any) -> int:
        """Return the operations for forward and backward of one batch, from shapes alone."""
        if not self._per_element or self._input_name not in inputs:
            return 0
        main = inputs[self._input_name]
        return self._per_element * main.numel() if isinstance(main, torch.Tensor) else 0
