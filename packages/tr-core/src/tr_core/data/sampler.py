"""Choose which samples each micro-batch uses, in a seeded order or in the order of a user's sampler.

The seeded order is a pure function of seed, epoch and position. All ranks share one order of the samples. A micro-batch
of all ranks is a contiguous part of that order, and each rank takes its slice of it. The position counts samples, so a
run resumes at the same sample with another batch size or world size.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any, NamedTuple, cast

import torch
from torch.autograd import profiler
from torch.utils.data import DataLoader, Sampler
from torch.utils.data.dataloader import _SingleProcessDataLoaderIter

from tr_core.data.computed_order import ComputedOrder, in_its_memory
from tr_core.data.length_grouping import LengthGrouping
from tr_core.data.virtual_shards import VirtualShards
from tr_core.random_state import derive_seed, find_generators, read_states, separate_randomness, write_states
from tr_core.signatures import parameters_of
from tr_log import get_logger

logger = get_logger(__name__)


class Slice(NamedTuple):
    """One rank's share of a micro-batch.

    Attributes:
        start: first index of the share in the global order.
        stop: one past its last index.
        end: one past the last index of the micro-batch of all ranks: the position once it is consumed.
        weight: factor for a mean over this share. With it, the mean over ranks is the mean over all samples of the
            micro-batch. It is 1, except in a short last micro-batch that does not divide evenly.
    """

    start: int
    stop: int
    end: int
    weight: float


def permutation(num_samples: int, seed: int, epoch: int) -> torch.Tensor:
    """Return the order of an epoch, of shape (samples,), as the reference Trainer's for the same seed.

    The numbers are those of int64, in the half of its memory (int32) for fewer than 2**31 samples.
    """
    return draw_permutation(num_samples, torch.Generator().manual_seed(seed + epoch))


def draw_permutation(num_samples: int, generator: torch.Generator | None = None) -> torch.Tensor:
    """Return `torch.randperm` of a generator, torch's own by default, in int32 if that holds all numbers."""
    dtype = torch.int32 if num_samples < 2**31 else torch.int64
    return torch.randperm(num_samples, generator=generator, dtype=dtype)


def has_length(dataset: Any) -> bool:
    """Whether a data set has a length."""
    try:
        return len(dataset) is not None
    except (TypeError, AttributeError, NotImplementedError):
        return False


def num_micro_batches(num_samples: int, per_step: int, drop_last: bool) -> int:
    """Count the micro-batches of `num_samples`, with `per_step` samples of all ranks in each."""
    return num_samples // per_step if drop_last else -(-num_samples // per_step)


def take_slice(index: int, start: int, num_samples: int, batch_size: int, rank: int, world_size: int) -> Slice:
    """Return a rank's share of the `index`-th micro-batch after position `start`.

    A full micro-batch gives each rank `batch_size` samples in a row. A short one is divided as evenly as possible. A
    rank without a sample repeats the first one with weight 0, because every rank must take part in the step.
    """
    per_step = batch_size * world_size
    begin = start + index * per_step
    end = min(begin + per_step, num_samples)
    count = end - begin
    lower, upper = begin + rank * count // world_size, begin + (rank + 1) * count // world_size
    if lower == upper:
        return Slice(begin, begin + 1, end, 0.0)
    return Slice(lower, upper, end, (upper - lower) * world_size / count)


class Batch(list[int]):
    """Indices of one micro-batch.

    Attributes:
        seed: seed for random numbers while they are loaded.
        epoch: the epoch to set in the data set; None leaves it unchanged.
    """

    seed: int = 0
    epoch: int | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle with the seed and the epoch."""
        return _batch, (list(self), self.seed, self.epoch)


def _batch(indices: Iterable[int], seed: int, epoch: int | None) -> Batch:
    batch = Batch(indices)
    batch.seed, batch.epoch = seed, epoch
    return batch


class EpochSampler(Sampler[list[int]]):
    """Batch sampler over one epoch's global order, for one rank, from any position.

    Args:
        shuffle: permute by seed and epoch; else the data set's own order.
        computed: permute as `ComputedOrder` does, without a list of all samples.
        grouping: brings shuffled samples of similar length together.
        drop_last: leave out a short last micro-batch.
        shards: those of this rank, where `world_size` is their number; None without.
    """

    def __init__(
        self,
        num_samples: int,
        batch_size: int,
        *,
        shuffle: bool,
        seed: int,
        drop_last: bool = False,
        rank: int = 0,
        world_size: int = 1,
        grouping: LengthGrouping | None = None,
        computed: bool = False,
        shards: VirtualShards | None = None,
    ) -> None:
        self.num_samples, self.batch_size = num_samples, batch_size
        self.shuffle, self.seed, self.drop_last = shuffle, seed, drop_last
        self.grouping, self.computed = grouping, computed
        self.rank, self.world_size, self.shards = rank, world_size, shards
        self.epoch, self.start = 0, 0
        self._names_epoch = False

    def seek(self, epoch: int, position: int = 0, *, names_epoch: bool = False) -> None:
        """Make the next iteration begin at `position` samples into `epoch`, at no cost."""
        self.epoch, self.start, self._names_epoch = epoch, position, names_epoch

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration that of an epoch, for a loader inside one of a subclass."""
        self.seek(epoch)

    def __len__(self) -> int:
        per_step = self.batch_size * self.world_size
        shards = 1 if self.shards is None else self.shards.turns
        return shards * num_micro_batches(self.num_samples - self.start, per_step, self.drop_last)

    @property
    def strategy(self) -> str:
        """The order's name in `train_sampling_strategy`."""
        if not self.shuffle:
            return "sequential"
        if self.computed:
            return "random_computed"
        return "random" if self.grouping is None else "group_by_length"

    def order(self) -> range | memoryview | ComputedOrder:
        """Return the samples of the epoch in order, to slice; the same on every rank and from every position.

        A shuffled order is a list of all samples, of 4 bytes each (8 from 2**31 samples on). The others need no memory.
        """
        if not self.shuffle:
            return range(self.num_samples)
        if self.computed:
            size, stride = self.batch_size, self.batch_size * self.world_size
            return ComputedOrder(self.num_samples, self.seed, self.epoch, size, stride)
        shuffled = permutation(self.num_samples, self.seed, self.epoch)
        return in_its_memory(shuffled if self.grouping is None else self.grouping.arrange(shuffled))

    def drawn_from(self) -> dict[str, Any] | None:
        """Return the states of the order's generators; None if the order is a function of the arguments."""
        return None

    def restore_drawn_from(self, state: Mapping[str, Any]) -> None:
        """Do nothing: there is nothing to restore."""

    def __iter__(self) -> Iterator[list[int]]:
        order = self.order()
        first_seed = derive_seed(self.seed, self.epoch)
        size, total, rank, world_size = self.batch_size, self.num_samples, self.rank, self.world_size
        if self.shards is not None:
            for share in self.shares(self.start):
                epoch = self.epoch if self._names_epoch else None
                yield _batch(order[share.start : share.stop], first_seed + share.start, epoch)
            return
        for index in range(len(self)):
            lower = self.start + index * size * world_size + rank * size
            upper = lower + size
            if upper + (world_size - rank - 1) * size > total:
                lower, upper, *_ = take_slice(index, self.start, total, size, rank, world_size)
            batch = Batch(order[lower:upper])
            batch.seed = first_seed + lower
            batch.epoch = self.epoch if self._names_epoch else None
            yield batch

    def shares(self, position: int) -> Iterator[Slice]:
        """Yield the shares of this rank's virtual shards after `position`: of a step, one shard after the other."""
        shards = cast("VirtualShards", self.shards)
        left = num_micro_batches(self.num_samples - position, self.batch_size * self.world_size, self.drop_last)
        for first in range(0, left, shards.micro_batches):
            for shard in shards.own:
                for index in range(first, min(first + shards.micro_batches, left)):
                    yield take_slice(index, position, self.num_samples, self.batch_size, shard, self.world_size)
            if shards.takes_part:
                *_, end, _ = take_slice(first, position, self.num_samples, self.batch_size, 0, self.world_size)
                yield Slice(position, position + 1, end, 0.0)


class MicroBatch(NamedTuple):
    """One rank's collated samples, not moved to the device yet.

    Attributes:
        weight: factor for the mean loss over it (see `Slice`).
        end: position in the epoch, in samples of all ranks, once it is consumed.
        total: samples it holds for all ranks; None if each rank knows only its own.
    """

    inputs: Any
    weight: float
    end: int
    total: int | None


class SampledBatches:
    """A map-style data set in the Trainer's own order: any position costs the same."""

    def __init__(
        self, loader: DataLoader[Any], sampler: EpochSampler, set_epoch: Callable[[int], object] | None = None
    ) -> None:
        self._loader, self._sampler, self._set_epoch = loader, sampler, set_epoch
        # A user's sampler may draw from data that grows.
        self._length = len(loader.dataset) if type(sampler) is EpochSampler else None  # type: ignore[arg-type]
        sampler.seek(0)
        self.samples_per_micro_batch = sampler.batch_size * sampler.world_size
        self.num_batches: int | None = self.remaining(0)
        self.num_samples: int | None = min(sampler.num_samples, self.num_batches * self.samples_per_micro_batch)

    def remaining(self, position: int) -> int:
        """Count the micro-batches of an epoch after `position` samples."""
        sampler = self._sampler
        return num_micro_batches(
            max(sampler.num_samples - position, 0), self.samples_per_micro_batch, sampler.drop_last
        )

    def iterate(self, epoch: int, position: int) -> Iterator[MicroBatch]:
        """Yield the micro-batches of an epoch after `position` samples.

        Raises:
            ValueError: the data set's length has changed since the run began.
        """
        if self._set_epoch is not None:
            self._set_epoch(epoch)
        self._check_length(epoch)
        self._sampler.seek(epoch, position, names_epoch=self._set_epoch is not None)
        sampler, full, end = self._sampler, self.samples_per_micro_batch, position
        batches: Any = iter(self._loader)
        if sampler.shards is not None:
            for inputs, share in zip(batches, sampler.shares(position), strict=True):
                yield MicroBatch(inputs, share.weight, share.end, None)
            return
        is_here = type(batches) is _SingleProcessDataLoaderIter
        with suppress(StopIteration):
            while True:
                # Without a profiler torch's block for it is left out, which costs as much as a small batch.
                inputs = batches._next_data() if is_here and not profiler._is_profiler_enabled else next(batches)
                begin, end = end, end + full
                if end <= sampler.num_samples:
                    yield MicroBatch(inputs, 1.0, end, full)
                else:
                    share = take_slice(
                        0, begin, sampler.num_samples, sampler.batch_size, sampler.rank, sampler.world_size
                    )
                    yield MicroBatch(inputs, share.weight, share.end, share.end - begin)

    def samples_of(self, position: int, size: int) -> list[tuple[Slice, list[int]]]:
        """Return this rank's shares of the epoch's next micro-batches, with the indices of their samples in the data.

        Args:
            position: samples of the epoch before them.
            size: number of micro-batches of a step on this rank.
        """
        sampler, order = self._sampler, self._sampler.order()
        place = (sampler.num_samples, sampler.batch_size, sampler.rank, sampler.world_size)
        if sampler.shards is None:
            shares = [take_slice(index, position, *place) for index in range(size)]
        else:
            shares = list(islice(sampler.shares(position), size))
        return [(share, [*map(int, order[share.start : share.stop])]) for share in shares]

    def _check_length(self, epoch: int) -> None:
        if self._length is not None and (length := len(self._loader.dataset)) != self._length:  # type: ignore[arg-type]
            raise ValueError(
                f"the data set held {self._length} samples when the run began and holds {length} where epoch {epoch} "
                f"begins; the order and the length of the run are those of {self._length}. Change its samples and keep "
                "their number, override _get_train_sampler, which may draw from data that grows, or call train() again "
                "with the changed data"
            )

    def order_state(self) -> dict[str, Any]:
        """Return the state of the order, apart from arguments that a resumed run may not change."""
        grouping, drawn_from = self._sampler.grouping, self._sampler.drawn_from()
        return {
            "strategy": self._sampler.strategy,
            "samples_per_step": None if grouping is None else grouping.samples_per_step,
            **({} if drawn_from is None else {"drawn_from": drawn_from}),
        }

    def restore_order(self, state: Mapping[str, Any], position: int) -> None:
        """Restore the order of a saved `order_state`, at `position` samples into an epoch.

        Raises:
            ValueError: the epoch began in another order than the arguments give now.
        """
        sampler, grouping = self._sampler, self._sampler.grouping
        # Empty if the data of the saved run was iterable, or its loader the user's own.
        saved = state.get("strategy", sampler.strategy)
        if saved != sampler.strategy and position > 0 and self.remaining(position) > 0:
            raise ValueError(
                f"the checkpoint is {position} samples into an epoch with train_sampling_strategy={saved!r}; going on "
                f"with {sampler.strategy!r} would repeat samples and leave others out. Resume with {saved!r}"
            )
        if grouping is not None and state.get("samples_per_step") is not None:
            sampler.grouping = LengthGrouping(grouping.lengths, state["samples_per_step"])
        if state.get("drawn_from") is not None and saved == sampler.strategy:
            sampler.restore_drawn_from(state["drawn_from"])

    def source_state(self) -> dict[str, Any] | None:
        """Return the states of the own generators of data set and collator; None without any."""
        states = read_states(self._generators())
        return {"generators": states} if states else None

    def restore_source(self, places: Sequence[Any], rank: int, world_size: int, *, in_epoch: bool = True) -> None:
        """Restore the own generators of data set and collator; any position is reached at no cost."""
        place = places[rank] if len(places) == world_size else None
        if place is None:
            return
        write_states(self._generators(), place["generators"])
        if in_epoch and self._loader.num_workers:
            logger.warning(
                "data set or collator have random number generators of their own (%s), which worker processes have "
                "copies of: the rest of this epoch draws other numbers than it would have. Draw from the global "
                "generators, which are seeded for each micro-batch, or set dataloader_num_workers=0",
                ", ".join(sorted(place["generators"])),
            )

    def _generators(self) -> dict[str, Any]:
        return find_generators({"dataset": self._loader.dataset, "collate_fn": self._loader.collate_fn})


class UserSampler(EpochSampler):
    """Batch sampler over the order of another sampler, for one rank, from any position.

    The other sampler is iterated once an epoch, with random numbers that depend on seed and epoch alone. So all ranks
    have one order, and a resumed run repeats it. A sampler with its own generator draws from that. A checkpoint then
    holds the generator's state at the beginning of the epoch. A sampler with `set_epoch` receives the epoch after that,
    and may draw its order then.
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
        self._begun: dict[str, Any] | None = None  # the epoch of the last order, and the generator states before it
        self._at_save: dict[str, Any] | None = None  # generator states of the save that the next order resumes from

    @property
    def strategy(self) -> str:
        """The order's name, in saved positions."""
        return f"own: {type(self._sampler).__name__}"

    def order(self) -> memoryview:
        """Return all samples of the epoch in order, of 8 bytes each.

        Raises:
            ValueError: their number differs from the sampler's length.
        """
        generators = find_generators(self._sampler)
        if self._begun is not None and self._begun["epoch"] == self.epoch:
            write_states(generators, self._begun["generators"])
        else:
            self._begun = {"epoch": self.epoch, "generators": read_states(generators)}
            self._at_save = None
        with separate_randomness(derive_seed(self.seed, self.epoch)):
            if hasattr(self._sampler, "set_epoch"):  # may draw the order
                self._sampler.set_epoch(self.epoch)
            indices = array("q", map(int, self._sampler))
        if self._at_save is not None:  # other code may draw from them too
            write_states(find_generators(self._sampler), self._at_save)
            self._at_save = None
        if len(indices) != self.num_samples:
            raise ValueError(
                f"{type(self._sampler).__name__} gave {len(indices)} samples in epoch {self.epoch} and has the length "
                f"{self.num_samples}; both must be the same"
            )
        return memoryview(indices)

    def drawn_from(self) -> dict[str, Any]:
        """Return the states of the sampler's own generators: the current ones and those at the start of the epoch."""
        return {"begun": self._begun, "generators": read_states(find_generators(self._sampler))}

    def restore_drawn_from(self, state: Mapping[str, Any]) -> None:
        """Restore the saved states."""
        self._begun, self._at_save = state["begun"], state["generators"]
        write_states(find_generators(self._sampler), state["generators"])


def call_sampler_method(method: Callable[..., Any], dataset: Any) -> Any:
    """Return the sampler of a `_get_train_sampler` or `_get_eval_sampler`; older ones take no data set."""
    return method(dataset) if parameters_of(method) else method()
