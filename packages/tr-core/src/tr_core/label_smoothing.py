"""Smooth the labels of a cross entropy (`label_smoothing_factor`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from tr_core.model_io import IGNORED_TARGET


class LabelSmoother:
    """Compute cross entropy with smoothed targets: a loss function for a Trainer.

    The loss of a target is `(1 - epsilon) * nll + epsilon * mean over classes of -log p`; targets of -100 do not count.

    Source: Szegedy et al. 2016, arXiv:1512.00567, section 7.

    Args:
        epsilon: share of a target that is spread over all classes, in [0, 1).
        model: the unwrapped model.
        shifts: returns whether the model predicts the next position, so that the targets are shifted here too.

    Raises:
        ValueError: the model's problem has several labels a sample, and so no single target to smooth.
    """

    def __init__(self, epsilon: float, model: nn.Module, shifts: Callable[[], bool | None] = lambda: False) -> None:
        if getattr(getattr(model, "config", None), "problem_type", None) == "multi_label_classification":
            raise ValueError(
                f"label_smoothing_factor={epsilon} has no meaning for problem_type='multi_label_classification'; set "
                "it to 0, or pass compute_loss_func"
            )
        self.epsilon, self.ignore_index, self._shifts = epsilon, IGNORED_TARGET, shifts

    def __call__(
        self,
        outputs: Any,
        labels: Any,
        num_items_in_batch: torch.Tensor | None = None,
        shift_labels: bool | None = None,
    ) -> torch.Tensor:
        """Return the mean over targets, or their sum divided by `num_items_in_batch`.

        Args:
            outputs: the model's outputs: a mapping with `logits`, or a tuple with the logits first.
            labels: class numbers, shape `(batch,)` or `(batch, positions)`.
            num_items_in_batch: targets of the full step.
            shift_labels: whether the targets are shifted; None if the model decides.

        Raises:
            ValueError: there are no labels.
        """
        if labels is None:
            raise ValueError("label_smoothing_factor needs a batch with 'labels'; this one has none")
        logits = outputs["logits"] if isinstance(outputs, Mapping) else outputs[0]
        if self._shifts() if shift_labels is None else shift_labels:
            logits, labels = logits[..., :-1, :], labels[..., 1:]
        total = nn.functional.cross_entropy(
            logits.reshape(-1, logits.shape[-1]).float(),
            labels.reshape(-1),
            ignore_index=IGNORED_TARGET,
            label_smoothing=self.epsilon,
            reduction="sum",
        )
        return total / (labels.ne(IGNORED_TARGET).sum() if num_items_in_batch is None else num_items_in_batch)
