"""Order samples so that those of similar length share a batch, and measure their lengths."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, cast

import numpy as np
import torch

from tr_core.random_state import separate_randomness
from tr_log import progress

# The reference's numbers: most steps in a sorted group, and fewest groups in an epoch.
STEPS_IN_A_GROUP, GROUPS_IN_AN_EPOCH = 50, 4
SAMPLES_AT_A_TIME = 1000


class LengthGrouping:
    """Turns a random order into one where neighbours are of similar length.

    The random order is cut into groups of up to 50 steps, and each group is sorted, long samples first. The group of a
    sample is random, so epochs differ.

    The size of a group depends on the samples of a step. A run keeps its first group size through its checkpoints.
    Resumed with another batch size or number of processes, it has the same order. Runs on 1, 2 or 4 processes with the
    same number of samples in a step have the same order.

    Source: `LengthGroupedSampler` of transformers 5.23, with the same order for the same permutation. Deviations: the
    permutation comes from the seed and the epoch, and `samples_per_step` counts all ranks.
    """

    def __init__(self, lengths: torch.Tensor, samples_per_step: int) -> None:
        self.lengths, self.samples_per_step = lengths, samples_per_step

    @property
    def group_size(self) -> int:
        """Number of samples that are sorted together."""
        per_step = self.samples_per_step
        return max(min(len(self.lengths) // (GROUPS_IN_AN_EPOCH * per_step), STEPS_IN_A_GROUP), 1) * per_step

    def arrange(self, shuffled: torch.Tensor) -> torch.Tensor:
        """Return the indices of `shuffled`, of shape (samples,), sorted within groups, the longest sample first.

        With the longest sample first, an epoch that does not fit into memory fails at its first step.
        """
        if not len(shuffled):
            return shuffled
        size = self.group_size
        whole = len(shuffled) // size * size
        groups = [self._sort(shuffled[:whole].view(whole // size, size)), self._sort(shuffled[whole:].view(1, -1))]
        arranged = torch.cat([group.flatten() for group in groups])
        heads = self.lengths[arranged[::size]]
        # Swapped, not moved: all other samples stay with samples of their length.
        longest = int(heads.argmax()) * size
        arranged[[0, longest]] = arranged[[longest, 0]]
        return arranged

    def _sort(self, groups: torch.Tensor) -> torch.Tensor:
        places = self.lengths[groups].argsort(dim=1, descending=True, stable=True)
        return groups.gather(1, places)


def measure_lengths(dataset: Any, column: str, input_name: str, *, show: bool = True) -> torch.Tensor:
    """Return the length of every sample of a map-style data set, int64 of shape (samples,).

    The length is the number in `column`, if the data has that column. Otherwise it is the `len` of the sample's
    `input_name`, and every sample is read once. The random state is restored after reading.

    Raises:
        ValueError: samples have neither, or no valid length in them; the message lists what they have.
    """
    if column in (getattr(dataset, "column_names", None) or ()):
        # Without its format a data set returns plain numbers and applies no transform.
        plain = dataset.with_format(None) if hasattr(dataset, "with_format") else dataset
        return _as_lengths(plain[column], int, column)
    if len(dataset) == 0:
        return torch.zeros(0, dtype=torch.int64)
    with separate_randomness(0):
        first = dataset[0]
        keys = sorted(map(str, first)) if isinstance(first, Mapping) else []
        name = next((name for name in (column, input_name) if name in keys), None)
        if name is None:
            raise ValueError(_unknown_lengths(dataset, first, keys, column, input_name))
        samples = progress(
            read_in_order(dataset), total=len(dataset), description="measuring lengths", disable=not show
        )
        return _as_lengths((sample[name] for sample in samples), int if name == column else len, name)


def read_in_order(dataset: Any) -> Iterator[Any]:
    """Yield all samples of a map-style data set, many at a time where the data set supports it."""
    get_many = getattr(dataset, "__getitems__", None)
    for start in range(0, len(dataset), SAMPLES_AT_A_TIME):
        indices = range(start, min(start + SAMPLES_AT_A_TIME, len(dataset)))
        yield from map(dataset.__getitem__, indices) if get_many is None else get_many(list(indices))


def _as_lengths(values: Iterable[Any], length_of: Callable[[Any], int], name: str) -> torch.Tensor:
    lengths = array("q")  # 8 bytes a sample; a list of numbers takes 4 times as much
    for value in values:
        try:
            lengths.append(length_of(value))
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            what = "a whole number" if length_of is cast("Any", int) else "something with a length"
            raise ValueError(
                f"train_sampling_strategy='group_by_length' takes lengths from {name!r}, but sample {len(lengths)} "
                f"has {value!r:.60} there; it must be {what}"
            ) from error
    return torch.from_numpy(np.array(lengths))


def _unknown_lengths(dataset: Any, first: Any, keys: list[str], column: str, input_name: str) -> str:
    has = f"have the columns {keys}" if keys else f"are of type {type(first).__name__}"
    return (
        f"train_sampling_strategy='group_by_length' needs the length of every sample, but those of "
        f"{type(dataset).__name__} {has}: neither {column!r}, which length_column_name names, nor {input_name!r}, "
        "which could be measured. Add a column of whole numbers and set length_column_name to its name, or use "
        "train_sampling_strategy='random'"
    )
