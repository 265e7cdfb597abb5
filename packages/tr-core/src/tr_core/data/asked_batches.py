"""Give the micro-batches of an epoch to an override that asks for them, and keep their position.

The position in the data counts the samples of the micro-batches that a step used. So a step uses exactly what the
override was asked to take.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from tr_core.data.sampler import MicroBatch
from tr_core.model_io import to_device


class AskedBatches:
    """The iterator over an epoch that `get_batch_samples` receives: batches on the device.

    Args:
        batches: the micro-batches of the epoch.
        device: where the batches are moved to.

    Attributes:
        taken: the micro-batches that were taken for this step.
    """

    def __init__(self, batches: Iterator[MicroBatch], device: torch.device) -> None:
        self._batches, self._device = batches, device
        self._size, self._has_ended = 0, False
        self.taken: list[MicroBatch] = []

    def begin_step(self, size: int) -> None:
        """Begin a step that may take `size` micro-batches."""
        self._size, self.taken = size, []

    def __iter__(self) -> AskedBatches:
        return self

    def __next__(self) -> Any:
        if len(self.taken) == self._size:
            raise RuntimeError(
                f"get_batch_samples was asked for {self._size} batches and takes one more: a resumed run would not "
                "know which samples were used. Take num_batches of them, or override get_train_dataloader to leave "
                "batches out"
            )
        batch = next(self._batches, None)
        if batch is None:
            self._has_ended = True
            raise StopIteration
        batch = batch._replace(inputs=to_device(batch.inputs, self._device))
        self.taken.append(batch)
        return batch.inputs

    def returned(self, inputs: Iterable[Any]) -> list[MicroBatch]:
        """Return the micro-batches that were taken, with the inputs that the override made of them.

        Raises:
            RuntimeError: their number is another one than was asked for.
        """
        inputs, number = list(inputs), len(self.taken)
        if number < self._size and not self._has_ended:
            raise RuntimeError(
                f"get_batch_samples was asked for {self._size} batches and took {number} of epoch_iterator: the others "
                "would be trained in a later step, and the length of the run would be another one. Take num_batches "
                "of them, and change their contents where other inputs are needed"
            )
        if len(inputs) != number:
            raise RuntimeError(
                f"get_batch_samples took {number} batches and returned {len(inputs)}: a step uses as many as it takes, "
                "so that a resumed run knows which samples were used. Return one for each, or override "
                "get_train_dataloader, whose batches may have any size"
            )
        return [batch._replace(inputs=own) for batch, own in zip(self.taken, inputs, strict=True)]


# What takes the batches of a step of some size, and counts its targets.
TakeBatches = Callable[[AskedBatches, int], tuple[list[MicroBatch], torch.Tensor | None]]
