"""Take samples in an order that a sampler of the user's own gives."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from tr_core.data.order import EpochSampler
from tr_core.randomness import mix, separate_randomness


class OwnOrderSampler(EpochSampler):
    """Batch sampler over the order of another sampler, for one rank, from any position.

    The other one is gone through anew for every epoch, with random numbers that depend on seed and epoch alone: so all
    ranks have one order, and a resumed run has the one it had. A sampler with a generator of its own has its numbers
    from there; it is told the epoch if it has `set_epoch`.

    Args:
        sampler: gives indices of samples, and has a length.
        batch_size: samples per rank and micro-batch.
        **options: further arguments of `EpochSampler`.

    Raises:
        ValueError: the sampler has no length.
    """

    def __init__(self, sampler: Any, batch_size: int, **options: Any) -> None:
        try:
            count = len(sampler)
        except TypeError:
            raise ValueError(
                f"{type(sampler).__name__}, which a sampler method of the Trainer returned, has no length; give it "
                "__len__, the number of samples it goes through"
            ) from None
        super().__init__(count, batch_size, shuffle=True, **options)
        self._sampler = sampler

    @property
    def strategy(self) -> str:
        """The order's name, in saved positions."""
        return f"own: {type(self._sampler).__name__}"

    def order(self) -> torch.Tensor:
        """Return all samples of the epoch in order, int64.

        Raises:
            ValueError: they are more or fewer than the sampler's length.
        """
        if hasattr(self._sampler, "set_epoch"):
            self._sampler.set_epoch(self.epoch)
        with separate_randomness(mix(self.seed, self.epoch)):
            indices = [int(index) for index in self._sampler]
        if len(indices) != self.num_samples:
            raise ValueError(
                f"{type(self._sampler).__name__} gave {len(indices)} samples in epoch {self.epoch} and has the length "
                f"{self.num_samples}; both must be the same"
            )
        return torch.tensor(indices, dtype=torch.int64)


def ask_for_sampler(method: Callable[..., Any], dataset: Any) -> Any:
    """Return what a `_get_train_sampler` or `_get_eval_sampler` gives; older ones take no data set."""
    return method(dataset) if inspect.signature(method).parameters else method()
