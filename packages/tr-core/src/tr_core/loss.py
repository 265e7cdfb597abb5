"""Decide in one place what a loss is divided by, and which other parts a step's loss has.

A step's loss is the mean over the contents of its micro-batches, in one of two ways:

- *Counted*: the model, or `compute_loss_func`, divides a summed loss by `num_items_in_batch`. That is the number of
  targets in the full step over all ranks. Such a loss is already a share of the step's mean. The strategy averages
  gradients over ranks, so the loss is multiplied by their number.
- *Mean*: the loss is a mean over its own micro-batch. It is divided by the actual number of micro-batches in the step.
  It is weighted if ranks hold unequal shares of a short micro-batch.

The signature does not show which of the two it is, so nothing is guessed from it. Where it matters, the loss of the
first micro-batch is computed with the count and with twice the count: half of it is counted, the same is a mean. In
the same way it is seen whether an override of `compute_loss` that reads `current_gradient_accumulation_steps` divides
by it. A user's declaration has priority: `loss_is_scaled_for_ga` of the Trainer.

What a model of transformers takes for a target is seen in the same way: whether the first label of a row is one (a
model that predicts the next position shifts its labels), and whether a mean is over targets or over samples.

This file also holds dicts of losses from an override of `compute_loss`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import nn

from tr_core.data.sampler import MicroBatch
from tr_core.metric_means import check_name
from tr_core.model_io import IGNORED_TARGET, accepts_count, ignores_targets
from tr_core.protocols import Collectives
from tr_core.signatures import takes_argument
from tr_log.phases import EXCHANGE, phase


class Division(Enum):
    """Name the divisor of a loss from `compute_loss`."""

    MEAN = "what its own micro-batch holds"
    COUNTED = "the count of the whole step"
    AS_IS = "whatever its user wants"


@dataclass(frozen=True)
class Pair:
    """Hold the loss of one batch with the count, or the micro-batches, of its step and with twice that, all else equal.

    Attributes:
        number: what was doubled.
        once: the loss with that; NaN if the loss is not a single number, which its backward pass refuses.
        unit: the largest relative error of one rounding in the loss's type.
    """

    number: float
    once: float
    twice: float
    unit: float


_COUNTED, _MEAN, _ZERO, _UNCLEAR = "counted", "mean", "zero", "unclear"


def compare(pairs: Sequence[Pair]) -> str | None:
    """Find out from the same batch, looked at once or repeatedly, what its loss is divided by.

    The longest way to divide is `exp(log(sum) - log(count))`. Its two logarithms, up to 16 each, and their difference
    are rounded, in both losses: at most 64 units of rounding. More than 1/32 would hide a part of the loss that is not
    divided. A loss that differs by itself, as sums in an arbitrary order do, may differ by four times that.

    Returns:
        `counted` if twice the number halves the loss, `mean` if it changes nothing, `zero` for a loss of 0, which shows
        neither, `unclear` for all else. None if the loss is not finite.
    """
    first = pairs[0]
    if not all(math.isfinite(pair.once) and math.isfinite(pair.twice) for pair in pairs):
        return None
    if first.once == 0.0:
        return _ZERO if first.twice == 0.0 else _UNCLEAR
    spread = max(max(abs(pair.once - first.once), abs(pair.twice - first.twice)) for pair in pairs)
    tolerance = min(64 * first.unit, 1 / 32) + 4 * spread / abs(first.once)
    if tolerance > 1 / 8:
        return _UNCLEAR
    ratio = first.twice / first.once
    return _COUNTED if abs(ratio - 0.5) <= tolerance else _MEAN if abs(ratio - 1.0) <= tolerance else _UNCLEAR


class LossRule:
    """Count the targets of a step, pass the count to the loss, and find out what the loss was divided by.

    Args:
        model: the unwrapped model, to find out whether it takes the count.
        average_tokens_across_devices: count over all ranks, not on this one only.
        declared: returns the user's declaration whether the model takes the count; None without one.
        divides_itself: the user's declaration of the attribute; None without one.
        first_is_target: computes from a micro-batch of training whether the first label of a row is a target; None if
            that cannot be computed now.

    Attributes:
        is_open: whether the losses of training were not looked at yet.
        observed: whether the losses of training are divided by the count; None if that is not known.
        evaluated: whether the losses of evaluations are means over targets, by the count or by themselves.
        shifts: whether the first label of a row is not a target; None if that is not known.
        was_zero: whether the last loss that was looked at was 0, and said nothing.
        divides_itself: whether the losses of training are divided by the micro-batches of their step already; None if
            that is not known, which matters only in a step of several.
        is_own_loss: set by `Trainer.compute_loss`: the Trainer computes the loss, not only an override.
    """

    def __init__(
        self,
        model: nn.Module,
        compute_loss_func: Callable[..., Any] | None,
        strategy: Collectives,
        *,
        replicas: int | None = None,
        average_tokens_across_devices: bool = True,
        declared: Callable[[], bool | None] = lambda: None,
        divides_itself: bool | None = None,
        first_is_target: Callable[[Any], bool | None] = lambda inputs: None,
    ) -> None:
        self._strategy, self._replicas = strategy, replicas or strategy.world_size
        self._over_ranks = average_tokens_across_devices and self._replicas > 1
        self._function, self._declared = compute_loss_func, declared
        self._model_takes_count = accepts_count(model)
        self._function_takes_count = compute_loss_func is not None and takes_argument(
            compute_loss_func, "num_items_in_batch"
        )
        has_encoder = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
        self.shifts: bool | None = None if ignores_targets(model) and not has_encoder else False
        self._first_is_target = first_is_target
        self._given_division = divides_itself
        self._gave_count = self._may_look = False
        self._is_unclear = False
        self.evaluated: bool | None = None
        self.is_own_loss = False
        self.forget()

    @property
    def accepts_count(self) -> bool:
        """Whether the model gets the count: by the user's declaration, else by its forward and class."""
        declared = self._declared()
        return self._model_takes_count if declared is None else bool(declared)

    @property
    def passes_count(self) -> bool:
        """Whether the model gets the count to compute its own loss."""
        return self._function is None and self.accepts_count

    @property
    def counts(self) -> bool:
        """Whether the model or a loss function gets the count."""
        return self._function_takes_count if self._function is not None else self.accepts_count

    def count(self, micro_batches: Sequence[MicroBatch]) -> torch.Tensor | None:
        """Count the targets of a step over all ranks, from host tensors; None if no batch has labels."""
        self.find_shift([batch.inputs for batch in micro_batches], self._first_is_target, over_ranks=True)
        return self._count([batch.inputs for batch in micro_batches if batch.weight > 0], over_ranks=self._over_ranks)

    def count_all(self, batches: Sequence[Any], *, over_ranks: bool) -> torch.Tensor | None:
        """Count the targets of batches that may be on the device, where nothing is read.

        None if a batch has no labels to count.
        """
        if over_ranks:  # of a step, not of an evaluation
            self.find_shift(batches, self._first_is_target, over_ranks=True)
        return self._count(batches, over_ranks=over_ranks and self._over_ranks)

    def _count(self, batches: Sequence[Any], *, over_ranks: bool) -> torch.Tensor | None:
        found = [self.count_inputs(inputs) for inputs in batches]
        if not self._expects_labels(found, over_ranks=over_ranks):
            return None
        known = [number for number in found if number is not None]
        total = sum(known, torch.zeros((), dtype=torch.int64, device=known[0].device if known else None))
        if total.device.type == "cpu":  # a copy to the device would be waited for
            total = torch.full((), int(total), dtype=torch.int64, device=self._strategy.device)
        return self._strategy.sum(total) if over_ranks else total

    def find_shift(
        self, batches: Sequence[Any], first_is_target: Callable[[Any], bool | None], *, over_ranks: bool
    ) -> None:
        """Find out whether the first label of a row is a target, if that is not known.

        Args:
            batches: some of the same step.
            first_is_target: computes it from one of them, by forwards that ranks make together; None if it cannot now.
            over_ranks: agree on it with the other ranks. Collective.
        """
        if self.shifts is not None or not self._has_sequences:
            return
        gather = self._strategy.gather_objects if over_ranks else lambda value: [value]
        inputs = next(filter(_is_sequences, batches), None)
        if not all(gather(inputs is not None)):
            self._has_sequences = False  # until another run or evaluation, which may have other data
            return
        answers = set(gather(first_is_target(inputs)))
        if answers != {None}:
            self.shifts = True not in answers

    def count_inputs(self, inputs: Any) -> torch.Tensor | None:
        """Count the targets of one batch on this rank, without leaving the device; None if it has no labels."""
        targets = self._targets(inputs)
        return None if targets is None else targets.ne(IGNORED_TARGET).sum()

    # Training

    def forget(self) -> None:
        """Look at the losses of training again: a run begins."""
        self.is_open, self.was_zero, self._has_sequences = True, False, True
        self.observed: bool | None = None
        self.divides_itself = self._given_division

    def asks(self, size: int, is_scaled: bool | None) -> bool:
        """Whether a loss must be looked at: what it is divided by is not known and matters. The same on all ranks."""
        matters = size > 1 or self._replicas > 1
        return self.is_open and matters and (is_scaled is None or (is_scaled and self._over_ranks))

    def observe(self, look: Callable[[], Pair], *, has_targets: bool, is_scaled: bool | None) -> None:
        """Find out what the losses of training are divided by. Collective.

        A loss of 0 or one that is not finite says nothing: the next one is looked at.

        Args:
            look: computes the loss of a micro-batch with the count and with twice the count.
            has_targets: whether it has a target; the sum over none is 0, and so is its gradient.
            is_scaled: the user's declaration.

        Raises:
            ValueError: the loss is neither, or contradicts the user's declaration.
        """
        pairs: list[Pair] = []
        answers, seen, is_unclear = set[str | None](), [pairs], True
        while is_unclear and len(pairs) < 2:
            pairs.append(look())
            answers, seen = self._exchange(pairs, has_targets=has_targets)
            is_unclear = _UNCLEAR in answers or {_COUNTED, _MEAN} <= answers
        if is_unclear and is_scaled is None:
            raise ValueError(_unclear(seen))
        if is_unclear or answers & {_COUNTED, _MEAN}:
            self.is_open, self.observed = False, _MEAN not in answers
        self.was_zero = self.is_open and _ZERO in answers and is_scaled is None

    def observe_accumulation(self, look: Callable[[], Pair], *, is_counted: bool) -> None:
        """Find out whether the losses of training are divided by the micro-batches of their step already. Collective.

        Args:
            look: computes the loss of a micro-batch with their number and with twice that.
            is_counted: whether the loss got the count of its step.

        Raises:
            ValueError: it cannot be seen, or the loss is divided by the count too.
        """
        answers, seen = self._exchange([look()], has_targets=True)
        self.was_zero = answers <= {None, _ZERO} and _ZERO in answers
        if answers <= {None, _ZERO}:
            return  # it says nothing: the next one is looked at
        is_unclear = _UNCLEAR in answers or {_COUNTED, _MEAN} <= answers
        if is_unclear or (_COUNTED in answers and is_counted and self.observed):
            raise ValueError(_divided_twice(seen))
        self.divides_itself = _COUNTED in answers

    def _exchange(self, pairs: list[Pair], *, has_targets: bool) -> tuple[set[str | None], list[list[Pair]]]:
        """Return what the ranks found, and what they saw. Collective."""
        answer = compare(pairs)
        with phase(EXCHANGE):
            gathered = self._strategy.gather_objects((None if answer == _ZERO and not has_targets else answer, pairs))
        return {found for found, _ in gathered}, [seen for _, seen in gathered]

    def division(self, given_count: bool | None, size: int, is_scaled: bool | None = None) -> Division:
        """Return what a micro-batch's loss is divided by.

        Args:
            given_count: whether the loss got the count; None if nothing was counted.
            size: micro-batches of the step.
            is_scaled: the user's declaration.

        Raises:
            ValueError: it contradicts the user's declaration.
        """
        used = bool(given_count and self.observed)
        if is_scaled is not None:
            is_ours = used and self.is_own_loss
            return Division.COUNTED if is_scaled and is_ours else Division.AS_IS if is_scaled else Division.MEAN
        is_known = given_count is False or (given_count and self.observed is not None)
        if is_known and not used and (size > 1 or self._over_ranks) and self._declared():
            raise ValueError(_contradicts())
        return Division.COUNTED if used else Division.AS_IS if self.divides_itself else Division.MEAN

    def share(self, loss: torch.Tensor, division: Division, size: int, weight: float) -> torch.Tensor:
        """Scale one micro-batch's loss, or a part of it, to its share of the step's loss."""
        if division is not Division.MEAN:
            if weight == 0.0:  # a filler sample that belongs to another rank, which counts it
                return loss * 0.0
            return loss * self._replicas if self._over_ranks and division is Division.COUNTED else loss
        if weight != 1.0:
            loss = loss * weight
        return loss / size if size > 1 else loss

    # Evaluation

    def begin_evaluation(self) -> None:
        """Begin an evaluation, whose first batch is looked at if what its losses are divided by is not known."""
        self._gave_count, self._may_look, self._has_sequences = False, not self._is_unclear, True

    def asks_in_evaluation(self) -> bool:
        """Whether the loss of an evaluation batch that got the count must be looked at.

        With several ranks only the first batch is: all ranks have one, and their forwards may wait for each other.
        """
        self._gave_count = True
        asks = self._may_look and self.evaluated is None and not self.observed
        self._may_look = self._may_look and self._strategy.world_size == 1
        return asks

    def observe_evaluation(self, look: Callable[[], Pair], is_over_targets: Callable[[], bool | None]) -> None:
        """Find out whether the losses of evaluations are means over targets.

        Args:
            look: computes the loss of a batch with the count and with twice the count.
            is_over_targets: computes whether a loss that does not depend on the count is such a mean.
        """
        answer = compare([look()])
        self._is_unclear = answer == _UNCLEAR
        self._may_look = self._may_look and not self._is_unclear
        self.evaluated = {_COUNTED: lambda: True, _MEAN: is_over_targets}.get(str(answer), lambda: None)()

    def weighs_targets(self, takes_count: bool) -> bool | None:
        """Whether the loss of an evaluation batch is a mean over its targets, not over its samples.

        Args:
            takes_count: whether `compute_loss` takes the count.

        Returns:
            True or False; None if that cannot be seen.
        """
        if self.evaluated:
            return True
        known = self.evaluated if self.observed is None else self.observed
        return known if known is not None or self._gave_count else takes_count

    def _expects_labels(self, counts: Sequence[Any], *, over_ranks: bool) -> bool:
        """Whether all batches of a step have labels, so that they are counted. `over_ranks`: as all ranks agree on it.

        A rank that only takes part in the step, with none of its own samples, agrees to either.

        Raises:
            ValueError: some ranks have labels and others have not; on all ranks.
        """
        lacks = any(count is None for count in counts)
        if not over_ranks:
            return not lacks
        # Waits on the host for the other ranks: one that has no labels must not begin a step that others count.
        some_lack, some_have = self._strategy.all_reduce_max([lacks, bool(counts) and not lacks])()
        if some_lack and some_have:
            ranks = [rank for rank, of_rank in enumerate(self._strategy.gather_objects(lacks)) if of_rank]
            raise ValueError(_some_lack_labels(ranks, self._strategy.world_size))
        return not some_lack

    def _targets(self, inputs: Any) -> torch.Tensor | None:
        if not isinstance(inputs, Mapping):
            return None
        shifted: Any = inputs.get("shift_labels")
        labels: Any = inputs.get("labels")
        if isinstance(shifted, torch.Tensor):
            return shifted
        if self.shifts and _is_sequences(inputs):
            # The first position of a sequence is not a target if the model predicts the next position.
            return inputs["labels"][..., 1:]
        return labels if isinstance(labels, torch.Tensor) else None


def _is_sequences(inputs: Any) -> bool:
    """Whether a batch has a label for each position of a row, from which its loss may leave out the first."""
    labels = inputs.get("labels") if isinstance(inputs, Mapping) and "shift_labels" not in inputs else None
    return isinstance(labels, torch.Tensor) and labels.dim() == 2 and not labels.is_floating_point()


def _some_lack_labels(ranks: Sequence[int], world_size: int) -> str:
    return (
        f"rank {', '.join(map(str, ranks))} of {world_size} has a batch without labels in a step in which other ranks "
        "have labels in all of theirs, and the loss is divided by the targets of all ranks. Give every batch labels, "
        "-100 where there is nothing to learn, or give none"
    )


_DECLARE = (
    "Set loss_is_scaled_for_ga of the Trainer: True if compute_loss divides for the whole step, False if its loss is a "
    "mean over its micro-batch"
)


ZERO_WITH_GRADIENTS = (
    "the loss of this micro-batch is 0 and its gradients are not, so whether it is divided for the whole step cannot "
    f"be seen, and decides what the gradients are divided by. {_DECLARE}"
)


def _seen(pairs_of_ranks: Sequence[Sequence[Pair]]) -> str:
    return "; ".join(
        f"{' and '.join(f'{pair.once:.7g}' for pair in pairs)} with {pairs[0].number:g}, "
        f"{' and '.join(f'{pair.twice:.7g}' for pair in pairs)} with {2 * pairs[0].number:g}"
        for pairs in pairs_of_ranks
    )


def _divided_twice(pairs_of_ranks: Sequence[Sequence[Pair]]) -> str:
    return (
        "compute_loss reads current_gradient_accumulation_steps, and whether it divides the loss by that cannot be "
        "seen, or it does and divides by num_items_in_batch too. The loss of the first micro-batch: "
        f"{_seen(pairs_of_ranks)}. {_DECLARE}"
    )


def _unclear(pairs_of_ranks: Sequence[Sequence[Pair]]) -> str:
    return (
        "what the loss is divided by cannot be seen, and decides what the gradients are divided by: twice the "
        "num_items_in_batch gives neither half of the loss nor the same. The loss of the first micro-batch, computed "
        f"twice: {_seen(pairs_of_ranks)}. {_DECLARE}"
    )


def _contradicts() -> str:
    return (
        "model_accepts_loss_kwargs=True was set, which has the loss taken as divided by num_items_in_batch, but the "
        "loss does not depend on it; set loss_is_scaled_for_ga of the Trainer: True if the loss is divided for the "
        "whole step all the same, False if it is a mean over its micro-batch; or do not set model_accepts_loss_kwargs"
    )


def split_loss(returned: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the loss, and by name the scalars to log in addition to it.

    Raises:
        TypeError: it is not a mapping.
        ValueError: there is no loss in it, an entry is not a scalar, or its name is taken.
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
