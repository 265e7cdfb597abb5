"""Reckon the mean loss of an evaluation: over samples, or over targets where the loss is one of targets."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from tr_core.trainer import Trainer

# Losses of so many batches are made one tensor: a scalar on an accelerator takes half a kilobyte.
_CHUNK = 1024


class EvaluationLoss:
    """The losses of the batches of an evaluation, on the device until `mean` reads them.

    A batch counts by its targets where the loss rule counts them, else by its samples: the mean does not depend on
    the batch size.

    Args:
        trainer: whose loss rule, strategy and arguments are used.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._rule, self._strategy, self._args = trainer.loss_rule, trainer.strategy, trainer.args
        self._losses: list[torch.Tensor] = []
        self._weights: list[torch.Tensor] = []
        self._chunks: list[tuple[torch.Tensor, torch.Tensor]] = []

    def add(self, loss: torch.Tensor | None, inputs: Any, rows: int) -> None:
        """Take in a batch.

        Args:
            loss: its mean loss, a scalar; None where it has no labels.
            inputs: the batch, on the device.
            rows: its samples; 0 where they are another rank's.

        Raises:
            ValueError: perplexity is asked for, and the labels are no tokens.
        """
        if loss is None:
            return
        targets = self._rule.count_inputs(inputs) if rows and self._rule.counts else None
        if self._args.eval_perplexity and rows:
            _check_tokens(inputs)
        self._losses.append(loss.detach().float())
        self._weights.append(torch.full((), rows, device=self._strategy.device) if targets is None else targets)
        if len(self._losses) == _CHUNK:
            self._close_chunk()

    def metrics(self, prefix: str) -> dict[str, float]:
        """Return `<prefix>_loss`, and `<prefix>_perplexity` if that is asked for; nothing if there was no loss.

        Every rank calls it, and gets the mean over all ranks.
        """
        mean = self._mean()
        if mean is None:
            return {}
        found = {f"{prefix}_loss": mean}
        if self._args.eval_perplexity:
            found[f"{prefix}_perplexity"] = perplexity(mean)
        return found

    def _mean(self) -> float | None:
        self._close_chunk()
        values, weights = torch.zeros(0), torch.zeros(0)
        if self._chunks:
            values = torch.cat([losses for losses, _ in self._chunks]).cpu()  # sync: once an evaluation
            weights = torch.cat([weights for _, weights in self._chunks]).cpu().double()
        keep = weights > 0
        if self._args.logging_nan_inf_filter:
            keep &= torch.isfinite(values)
        total = float((values.double()[keep] * weights[keep]).sum())
        sums = self._strategy.gather_objects((total, float(weights[keep].sum()), len(values)))
        counted, batches = sum(weight for _, weight, _ in sums), sum(number for *_, number in sums)
        if not counted:  # nothing that counts, or no loss that is a number
            return math.nan if batches else None
        return sum(part for part, *_ in sums) / counted

    def _close_chunk(self) -> None:
        if self._losses:
            self._chunks.append((torch.stack(self._losses), torch.stack(self._weights)))
            self._losses, self._weights = [], []


def perplexity(mean_loss: float) -> float:
    """Return `exp(mean_loss)`, infinite where that is beyond what a float can hold."""
    try:
        return math.exp(mean_loss)
    except OverflowError:
        return math.inf


def _check_tokens(inputs: Any) -> None:
    named = inputs if isinstance(inputs, Mapping) else {}
    given = [named[name] for name in ("shift_labels", "labels") if isinstance(named.get(name), torch.Tensor)]
    if any(labels.dim() > 1 and not labels.is_floating_point() for labels in given):
        return
    kinds = [f"{tuple(labels.shape)} of {labels.dtype}" for labels in given] or ["none"]
    raise ValueError(
        "eval_perplexity=True needs a loss over tokens: whole-number labels of shape (samples, length), not "
        f"{', '.join(kinds)}; set eval_perplexity=False"
    )
