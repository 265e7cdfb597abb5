"""Compute the mean loss of an evaluation: over samples, or over targets where the loss is one of targets."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from tr_core.trainer import Trainer

# Losses of so many batches are made one tensor: a scalar on an accelerator takes half a kilobyte.
_CHUNK = 1024
_NO_MEAN_OVER_TOKENS = (
    "eval_perplexity=True needs a mean over tokens, but the loss does not depend on num_items_in_batch, the number of "
    "tokens: it is a mean of another kind. Divide a summed loss by num_items_in_batch, or set eval_perplexity=False"
)
_WEIGHTS_UNKNOWN = (
    "the loss of this evaluation is {} if its batches count by their samples and {} if they count by their targets, "
    "and which it is cannot be seen: num_items_in_batch was read as a number, by int(), float(), .item() or the like, "
    "which leaves no trace in the loss. If the loss is a mean over targets, divide by num_items_in_batch itself, which "
    "is a tensor; if not, do not read it in an evaluation (model.training is False), or train first"
)


class EvaluationLoss:
    """The losses of the batches of an evaluation, on the device until `mean` reads them.

    A batch counts by its targets where its loss, or those of training, depend on the number of targets, else by its
    samples: the mean does not depend on the batch size.

    Args:
        trainer: whose loss rule, strategy and arguments are used.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._rule, self._strategy, self._args = trainer.loss_rule, trainer.strategy, trainer.args
        self._takes_count = trainer._loss_takes_count
        self._losses: list[torch.Tensor] = []
        self._weights: list[torch.Tensor] = []
        self._other_weights: list[torch.Tensor] = []
        self._chunks: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []

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
        by_targets = self._rule.weighs_targets(self._takes_count) if targets is not None else False
        if self._args.eval_perplexity and rows:
            _check_tokens(inputs)
            if by_targets is False:
                raise ValueError(_NO_MEAN_OVER_TOKENS)
        samples = torch.full((), rows, device=self._strategy.device)
        self._losses.append(loss.detach().float())
        self._weights.append(samples if targets is None or not by_targets else targets)
        # Where it is not known which of the two weighs the loss, it must not matter.
        self._other_weights.append(targets if targets is not None and by_targets is None else self._weights[-1])
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
        values, weights, others = torch.zeros(0), torch.zeros(0), torch.zeros(0)
        if self._chunks:
            parts = zip(*self._chunks, strict=True)
            values, weights, others = (torch.cat(part).cpu() for part in parts)  # sync: once an evaluation
        parts = [*self._sums(values, weights), *self._sums(values, others)]
        sums = self._strategy.gather_objects((parts, len(values)))
        total, counted, other_total, other_counted = (
            sum(numbers) for numbers in zip(*(p for p, _ in sums), strict=True)
        )
        if not counted:  # nothing that counts, or no loss that is a number
            return math.nan if sum(batches for _, batches in sums) else None
        mean, other = total / counted, other_total / other_counted if other_counted else math.nan
        if not math.isclose(mean, other, rel_tol=1e-6) and math.isfinite(mean):
            raise ValueError(_WEIGHTS_UNKNOWN.format(mean, other))
        return mean

    def _sums(self, losses: torch.Tensor, weights: torch.Tensor) -> tuple[float, float]:
        keep, weights = weights > 0, weights.double()
        if self._args.logging_nan_inf_filter:
            keep &= torch.isfinite(losses)
        return float((losses.double()[keep] * weights[keep]).sum()), float(weights[keep].sum())

    def _close_chunk(self) -> None:
        if self._losses:
            self._chunks.append(
                (torch.stack(self._losses), torch.stack(self._weights), torch.stack(self._other_weights))
            )
            self._losses, self._weights, self._other_weights = [], [], []


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
