"""Decide in one place what a loss is divided by, and what else a step's loss is made of.

A step's loss is the mean over what its micro-batches hold, in one of two ways:

- *Counted*: the model, or `compute_loss_func`, divides a summed loss by `num_items_in_batch`. That is the number of
  targets in the whole step over all ranks. Such a loss is already a share of the step's mean. The strategy averages
  gradients over ranks, so it is multiplied by their number.
- *Mean*: the loss is a mean over its own micro-batch. It is divided by the number of micro-batches that the step
  really has. It is weighted where ranks hold unequal shares of a short one.

The signature does not say which of the two it is, so nothing is guessed from it. The count is passed as an `ItemCount`,
which marks everything that is calculated with it. Each micro-batch's loss is checked for that mark. What a user
declares has priority: `loss_is_scaled_for_ga` of the Trainer.

Also here: dicts of losses that an override of `compute_loss` returns, label smoothing, and `StepScope`, which holds
what is known of the current step and micro-batch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import nn

from tr_core.data.sampler import MicroBatch
from tr_core.item_count import ItemCount, divides_by_any, plain
from tr_core.metric_means import MetricWindow, check_name
from tr_core.model_io import IGNORED_TARGET, accepts_count, averages_over_targets, shifts_targets
from tr_core.protocols import Collectives, Strategy
from tr_core.signatures import takes_argument


class Division(Enum):
    """What a loss was divided by when it came from `compute_loss`."""

    MEAN = "what its own micro-batch holds"
    COUNTED = "the count of the whole step"
    AS_IS = "whatever its user wants"


class LossRule:
    """What is counted in a step, who is told, and what a loss is then divided by.

    Args:
        model: the unwrapped model, to see whether it takes the count and shifts its targets.
        compute_loss_func: the user's loss function, if any.
        strategy: how counts are summed over ranks.
        average_tokens_across_devices: count over all ranks, not on this one only.
        declared: what the user says about whether the model takes the count; None where nothing.

    Attributes:
        observed: whether the last loss that could be looked at depended on the count; None before the first.
        is_own_loss: set by `Trainer.compute_loss`: the loss is made by the Trainer, not by an override alone.
    """

    def __init__(
        self,
        model: nn.Module,
        compute_loss_func: Callable[..., Any] | None,
        strategy: Strategy,
        *,
        average_tokens_across_devices: bool = True,
        declared: Callable[[], bool | None] = lambda: None,
    ) -> None:
        self._strategy = strategy
        self._over_ranks = average_tokens_across_devices and strategy.world_size > 1
        self._function, self._declared = compute_loss_func, declared
        self._model_takes_count = accepts_count(model)
        self._function_takes_count = compute_loss_func is not None and takes_argument(
            compute_loss_func, "num_items_in_batch"
        )
        self._shifts = shifts_targets(model)
        self._averages_over_targets = compute_loss_func is None and averages_over_targets(model)
        self._evaluated: tuple[bool | None, ...] = ()
        self._watches_aliases = False
        self.observed: bool | None = None
        self.is_own_loss = False

    @property
    def accepts_count(self) -> bool:
        """Whether the model is given the count: as the user says, else as its forward and class say."""
        declared = self._declared()
        return self._model_takes_count if declared is None else bool(declared)

    @property
    def tells_model(self) -> bool:
        """Whether the model is given the count to compute its own loss with."""
        return self._function is None and self.accepts_count

    @property
    def counts(self) -> bool:
        """Whether anything is given the count."""
        return self._function_takes_count if self._function is not None else self.accepts_count

    def count(self, micro_batches: Sequence[MicroBatch]) -> torch.Tensor | None:
        """Count the targets of a step over all ranks, from host tensors; nothing is read from a device.

        Returns:
            A scalar tensor on the device, or None where the batches have no labels to count.
        """
        found = [self._count_one(batch.inputs) for batch in micro_batches if batch.weight > 0]
        known = [number for number in found if number is not None]
        if len(known) < len(found):
            return None
        total = torch.full((), sum(known), dtype=torch.int64, device=self._strategy.device)
        return self._strategy.sum(total) if self._over_ranks else total

    def count_inputs(self, inputs: Any) -> torch.Tensor | None:
        """Count the targets of one batch on this rank, staying on the device; None where it has no labels."""
        targets = self._targets(inputs)
        return None if targets is None else targets.ne(IGNORED_TARGET).sum()

    def hand_over(self, num_items: torch.Tensor) -> ItemCount:
        """Return the count to give to a loss; `judge` looks afterwards at what became of it."""
        ItemCount.reads.clear()
        self.is_own_loss = False
        compiler: Any = sys.modules.get("torch._functorch.config")
        if compiler is not None and getattr(compiler, "check_custom_op_aliasing", False):
            # At the first call of compiled code this check refuses any subclass of a tensor.
            compiler.check_custom_op_aliasing, self._watches_aliases = False, True
        return num_items.as_subclass(ItemCount)

    def judge(
        self, loss: torch.Tensor, was_told: bool | None, size: int, weight: float, is_scaled: bool | None = None
    ) -> Division:
        """Say what a micro-batch's loss was divided by.

        Args:
            loss: scalar, as `compute_loss` gave it.
            was_told: whether the count was handed over for it; None where none was made.
            size: micro-batches of the step.
            weight: weight of this rank's share of the micro-batch.
            is_scaled: the Trainer's `loss_is_scaled_for_ga`; None leaves it to be seen.

        Raises:
            ValueError: it makes a difference and cannot be seen, or contradicts what the user declared.
        """
        used = self._look(loss) if was_told else False
        if was_told and used is not None:
            self.observed = used
        if is_scaled is not None:
            is_ours = bool(used) and self.is_own_loss
            return Division.COUNTED if is_scaled and is_ours else Division.AS_IS if is_scaled else Division.MEAN
        if not used and (size > 1 or weight != 1.0 or self._over_ranks):
            if used is None:
                raise ValueError(_cannot_be_seen())
            if was_told is not None and self._declared():
                raise ValueError(_contradicts())
        return Division.COUNTED if used else Division.MEAN

    def judge_evaluation(self, loss: torch.Tensor, was_told: bool) -> torch.Tensor:
        """Note whether the loss of an evaluation batch depends on the count, and return it as a plain tensor."""
        self._evaluated = (self._look(loss),) if was_told else ()
        return plain(loss)

    def weighs_targets(self, without_count: bool) -> bool | None:
        """Whether the loss of the last evaluation batch is one over its targets, not over its samples.

        It is if it depended on the count, or if the losses of training do; or if it is the model's own, of which the
        code says so.

        Args:
            without_count: the answer where neither was seen, because this loss was given no count.

        Returns:
            True or False; None where the loss may have been divided by a number that was read of the count.
        """
        seen, self._evaluated = self._evaluated, ()
        if True in seen or (self.is_own_loss and self._averages_over_targets):
            return True
        if self.observed is not None:
            return self.observed
        return seen[0] if seen else without_count

    def share(self, loss: torch.Tensor, division: Division, size: int, weight: float) -> torch.Tensor:
        """Turn one micro-batch's loss, or a part of it, into its share of the step's loss.

        Args:
            loss: scalar, as the model or loss function gave it.
            division: what it was divided by.
            size: micro-batches of the step.
            weight: weight of this rank's share of the micro-batch.
        """
        loss = plain(loss)
        if division is not Division.MEAN:
            if weight == 0.0:  # a sample of another rank's, here so that this one takes part: it is counted there
                return loss * 0.0
            return loss * self._strategy.world_size if self._over_ranks and division is Division.COUNTED else loss
        if weight != 1.0:
            loss = loss * weight
        return loss / size if size > 1 else loss

    def _look(self, loss: torch.Tensor) -> bool | None:
        """Whether a loss depends on the count it was given; None where that cannot be seen."""
        if self._watches_aliases:
            compiler: Any = sys.modules["torch._functorch.config"]
            compiler.check_custom_op_aliasing = True
            self._watches_aliases = False
        if isinstance(loss, ItemCount):
            return True
        return divides_by_any(loss, ItemCount.reads) if ItemCount.reads else False

    def _count_one(self, inputs: Any) -> int | None:
        targets = self._targets(inputs)
        return None if targets is None else int(targets.ne(IGNORED_TARGET).sum())

    def _targets(self, inputs: Any) -> torch.Tensor | None:
        if not isinstance(inputs, Mapping):
            return None
        shifted: Any = inputs.get("shift_labels")
        labels: Any = inputs.get("labels")
        if isinstance(shifted, torch.Tensor):
            return shifted
        if isinstance(labels, torch.Tensor) and self._shifts:
            # The first position of a sequence is nobody's target where the model predicts the next one.
            return labels[..., 1:]
        return labels if isinstance(labels, torch.Tensor) else None


def _cannot_be_seen() -> str:
    numbers = ", ".join(f"{number:g}" for number in sorted(set(ItemCount.reads)))
    return (
        f"the loss was multiplied or divided by a number after num_items_in_batch was read as a number ({numbers}), by "
        "int(), float(), .item() or the like: whether one comes from the other cannot be seen, and decides what the "
        "gradients are divided by. Divide by num_items_in_batch itself, which is a tensor, or set "
        "loss_is_scaled_for_ga of the Trainer: True if compute_loss divides for the whole step, False if its loss is a "
        "mean over its micro-batch"
    )


def _contradicts() -> str:
    return (
        "model_accepts_loss_kwargs=True was set, which has the loss taken as divided by num_items_in_batch, but the "
        "loss does not depend on it; set loss_is_scaled_for_ga of the Trainer: True if the loss is divided for the "
        "whole step all the same, False if it is a mean over its micro-batch; or do not set model_accepts_loss_kwargs"
    )


def split_loss(returned: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the loss, and by their names the scalars that are to be logged beside it.

    Args:
        returned: a mapping with `loss`, a tensor, and any number of further scalars.

    Raises:
        TypeError: it is no mapping.
        ValueError: there is no loss in it, an entry is no scalar, or its name is taken.
    """
    if not isinstance(returned, Mapping):
        raise TypeError(
            f"compute_loss returned a {type(returned).__name__}; it returns a scalar tensor, or a dict of scalars with "
            "'loss' among them, and only with return_outputs=True a pair of that and the model's outputs"
        )
    loss = returned.get("loss")
    if not isinstance(loss, torch.Tensor):
        raise ValueError(f"compute_loss returned a dict without a tensor 'loss', only {sorted(returned)}")
    parts = {name: _checked_scalar(name, value) for name, value in returned.items() if name != "loss"}
    return loss, parts


def _checked_scalar(name: str, value: Any) -> torch.Tensor:
    check_name(name)
    if isinstance(value, int | float):
        value = torch.tensor(value, dtype=torch.float64)
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.detach().reshape(())
    what = f"of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"
    raise ValueError(
        f"compute_loss returned a dict whose entry {name!r} is {what}; entries beside 'loss' are logged, so each is a "
        "number or a tensor with one element. Return outputs['loss'] if this is what the model gave"
    )


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


@dataclass(slots=True)
class StepScope:
    """What the loop knows of the step at hand, for what is called within it.

    It is an object of its own so that a step assigns nothing to the Trainer, which looks at what users assign to it.

    Attributes:
        size: micro-batches of the step.
        weight: weight of this rank's share of the micro-batch; 0.0 for a sample that is another rank's.
        loss: loss of the last step on this rank, a scalar tensor on the device; None before the first.
        outputs: what the model gave for this micro-batch, where a callback asks for it.
        metrics: where `log_metric` adds to: the open window of a run, or of an evaluation; None outside both.
    """

    size: int = 1
    weight: float = 1.0
    loss: torch.Tensor | None = None
    outputs: Any = None
    metrics: MetricWindow | None = None

    @contextmanager
    def separate_window(self, collectives: Collectives) -> Iterator[MetricWindow]:
        """Have what is logged within go to a window of its own, not to that of the training around it."""
        outer, window = self.metrics, MetricWindow(collectives)
        self.metrics = window
        try:
            yield window
        finally:
            self.metrics, self.weight = outer, 1.0
