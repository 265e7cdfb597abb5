"""Take samples in an order that a sampler of the user's own gives."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch

from tr_core.data.generators import find_generators, read_states, write_states
from tr_core.data.order import EpochSampler
from tr_core.randomness import mix, separate_randomness


class OwnOrderSampler(EpochSampler):
    """Batch sampler over the order of another sampler, for one rank, from any position.

    The other one is gone through anew for every epoch, with random numbers that depend on seed and epoch alone: so all
    ranks have one order, and a resumed run has the one it had. A sampler with a generator of its own has its numbers
    from there: the generator's state at the beginning of the epoch is part of a checkpoint. A sampler with `set_epoch`
    is given the epoch.

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
        self._begun: dict[str, Any] | None = None  # the epoch of the last order, and what it was drawn from

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
        generators = find_generators(self._sampler)
        if self._begun is not None and self._begun["epoch"] == self.epoch:
            write_states(generators, self._begun["generators"])
        else:
            self._begun = {"epoch": self.epoch, "generators": read_states(generators)}
        with separate_randomness(mix(self.seed, self.epoch)):
            indices = [int(index) for index in self._sampler]
        if len(indices) != self.num_samples:
            raise ValueError(
                f"{type(self._sampler).__name__} gave {len(indices)} samples in epoch {self.epoch} and has the length "
                f"{self.num_samples}; both must be the same"
            )
        return torch.tensor(indices, dtype=torch.int64)

    def drawn_from(self) -> dict[str, Any]:
        """Return the states of the sampler's own generators: of now, and of the beginning of the epoch."""
        return {"begun": self._begun, "generators": read_states(find_generators(self._sampler))}

    def restore_drawn_from(self, state: Mapping[str, Any]) -> None:
        """Go on from the states that were saved."""
        self._begun = state["begun"]
        write_states(find_generators(self._sampler), state["generators"])


def ask_for_sampler(method: Callable[..., Any], dataset: Any) -> Any:
    """Return what a `_get_train_sampler` or `_get_eval_sampler` gives; older ones take no data set."""
    return method(dataset) if inspect.signature(method).parameters else method()
