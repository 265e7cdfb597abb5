"""Spread a part of every target over all classes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from tr_core.losses.targets import IGNORED_TARGET, shifts_targets


class LabelSmoother:
    """A loss function for a Trainer: cross entropy with smoothed targets.

    The loss of a target is `(1 - epsilon) * nll + epsilon * mean over classes of -log p`; targets of -100 do not count.

    Source: Szegedy et al. 2016, arXiv:1512.00567, section 7.

    Args:
        epsilon: share of a target that is spread, in [0, 1).
        model: the unwrapped model; one that predicts the next position has its targets shifted here as there.

    Raises:
        ValueError: the model's problem is one of several labels a sample, which have no one target to smooth.
    """

    def __init__(self, epsilon: float, model: nn.Module) -> None:
        if getattr(getattr(model, "config", None), "problem_type", None) == "multi_label_classification":
            raise ValueError(
                f"label_smoothing_factor={epsilon} has no meaning for problem_type='multi_label_classification'; set "
                "it to 0, or pass compute_loss_func"
            )
        self._epsilon, self._shifts = epsilon, shifts_targets(model)

    def __call__(self, outputs: Any, labels: Any, num_items_in_batch: torch.Tensor | None = None) -> torch.Tensor:
        """Return the mean over targets, or their sum divided by `num_items_in_batch`.

        Args:
            outputs: what the model gave: a mapping with `logits`, or a tuple of which they are the first.
            labels: class numbers, shape `(batch,)` or `(batch, positions)`.
            num_items_in_batch: targets of the whole step.

        Raises:
            ValueError: there are no labels.
        """
        if labels is None:
            raise ValueError("label_smoothing_factor needs a batch with 'labels'; this one has none")
        logits = outputs["logits"] if isinstance(outputs, Mapping) else outputs[0]
        if self._shifts:
            logits, labels = logits[..., :-1, :], labels[..., 1:]
        total = nn.functional.cross_entropy(
            logits.reshape(-1, logits.shape[-1]).float(),
            labels.reshape(-1),
            ignore_index=IGNORED_TARGET,
            label_smoothing=self._epsilon,
            reduction="sum",
        )
        return total / (labels.ne(IGNORED_TARGET).sum() if num_items_in_batch is None else num_items_in_batch)
