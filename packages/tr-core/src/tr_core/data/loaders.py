"""Build the data loaders of training, evaluation and prediction."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from functools import partial
from operator import is_
from typing import Any

import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, Sampler

from tr_args import TrainingArguments
from tr_core.data.computed_order import ComputedOrder, in_its_memory
from tr_core.data.fetch import Collate, KeepColumns, MapFetch, StreamFetch, identity
from tr_core.data.length_grouping import LengthGrouping, measure_lengths
from tr_core.data.sampler import EpochSampler, UserSampler, draw_permutation, has_length, num_micro_batches
from tr_core.data.virtual_shards import VirtualShards, replicas
from tr_core.model_io import base_model
from tr_core.preemption.signals import blocked_signals, end_with_parent, ignore_group_signals, saves_on_signal
from tr_core.protocols import Collectives

# Options that may be assigned to a built loader. They are read when an iteration begins.
_OPTIONS = (
    "num_workers",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "generator",
    "prefetch_factor",
    "persistent_workers",
)


class SeededLoader(DataLoader[Any]):
    """A loader whose `dataset` and `collate_fn` are the user's own; an inner loader does the reading.

    Assigning `collate_fn`, `worker_init_fn` and the other options takes effect at the next iteration. Changes in the
    data set take effect at once where this process loads. With worker processes, which have copies, they take effect at
    the next epoch. Persistent workers keep their copies, as torch's do.
    """

    fetch: Any
    _reader: DataLoader[Any] | None = None
    _reader_options: tuple[Any, ...] = ()

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  torch's names its own class of iterators
        """Iterate over this rank's micro-batches."""
        options = {name: getattr(self, name) for name in _OPTIONS}
        made_of = (self.collate_fn, *options.values())
        reader = self._reader
        if reader is None or not all(map(is_, made_of, self._reader_options)):
            self.fetch.collate = self.collate_fn
            reader = self._build_reader(options)
            self._reader, self._reader_options = reader, made_of
        if reader.worker_init_fn is not ignore_group_signals:
            return iter(reader)
        with blocked_signals():
            return iter(reader)

    @property
    def total_batch_size(self) -> int:
        """Samples of a micro-batch on all ranks together, as of a loader that accelerate prepared."""
        raise NotImplementedError

    @property
    def total_dataset_length(self) -> int:
        """Samples of the data on all ranks together.

        Raises:
            TypeError: the data has no length.
        """
        return len(self.dataset)  # type: ignore[arg-type]  torch's data sets declare no length

    def _build_reader(self, options: dict[str, Any]) -> DataLoader[Any]:
        raise NotImplementedError


class SampledLoader(SeededLoader):
    """Loads map-style data in the order of an `EpochSampler`."""

    def __init__(
        self, dataset: Any, sampler: EpochSampler, collate: Collate, *, follows_epoch: bool, **options: Any
    ) -> None:
        super().__init__(dataset, batch_sampler=sampler, collate_fn=collate, **options)
        self.fetch: MapFetch = MapFetch(dataset, collate)
        self.follows_epoch = follows_epoch
        self._order = sampler

    @property
    def total_batch_size(self) -> int:
        """Samples of a micro-batch on all ranks together."""
        return self._order.batch_size * self._order.world_size

    def _build_reader(self, options: dict[str, Any]) -> DataLoader[Any]:
        return DataLoader(self.fetch, batch_sampler=self.batch_sampler, collate_fn=identity, **options)


class StreamLoader(SeededLoader):
    """Loads iterable data; each rank takes its own part of every round."""

    def __init__(self, fetch: StreamFetch, **options: Any) -> None:
        size, collate = fetch.batch_size, fetch.collate
        super().__init__(fetch.dataset, batch_size=size, collate_fn=collate, drop_last=fetch.drop_last, **options)
        self.fetch: StreamFetch = fetch

    def __len__(self) -> int:
        fetch = self.fetch
        return num_micro_batches(len(fetch.dataset), fetch.per_round, fetch.drop_last)

    @property
    def total_batch_size(self) -> int:
        """Samples of a round of all ranks."""
        return self.fetch.per_round

    def _build_reader(self, options: dict[str, Any]) -> DataLoader[Any]:
        return DataLoader(self.fetch, batch_size=None, collate_fn=identity, **options)


class UsualOrder(Sampler[int]):
    """The order of the arguments, for a loader that a subclass builds itself: another one at each iteration.

    A loader of the Trainer takes it for no sampler at all: its order is a function of seed and epoch. Here it is drawn
    from torch's generator, as by torch's `RandomSampler`.
    """

    def __init__(self, dataset: Any, strategy: str, grouping: Callable[[], LengthGrouping] | None = None) -> None:
        self._dataset, self._strategy, self._grouping = dataset, strategy, grouping

    def __len__(self) -> int:
        return len(self._dataset)

    def __iter__(self) -> Iterator[int]:
        count = len(self)
        if self._strategy == "sequential":
            yield from range(count)
        elif self._grouping is not None:
            yield from in_its_memory(self._grouping().arrange(draw_permutation(count)))
        else:
            yield from ComputedOrder(count, _draw_seed(), 0)


class UsualRandomOrder(UsualOrder, RandomSampler):
    """The usual order where it is a random one: torch's, in less memory, and what accelerate takes for torch's."""

    def __init__(self, dataset: Any) -> None:
        UsualOrder.__init__(self, dataset, "random")
        RandomSampler.__init__(self, dataset)

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(_draw_seed()) if self.generator is None else self.generator
        yield from in_its_memory(draw_permutation(len(self), generator))


def _draw_seed() -> int:
    return int(torch.empty((), dtype=torch.int64).random_())  # as RandomSampler draws it


class SeededOrder(RandomSampler):
    """Samples of a `RandomSampler` in an order of seed and epoch alone, as accelerate draws them in its place.

    Each whole iteration is of the epoch after the last one, unless `set_epoch` says another.
    """

    generator: torch.Generator

    def __init__(self, sampler: RandomSampler, seed: int) -> None:
        generator = torch.Generator() if sampler.generator is None else sampler.generator
        super().__init__(sampler.data_source, sampler.replacement, sampler._num_samples, generator)
        self.seed, self.epoch = seed, 0

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration that of an epoch."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        self.generator.manual_seed(self.seed + self.epoch)
        yield from super().__iter__()
        self.epoch += 1


def seed_order(loader: DataLoader[Any], seed: int) -> None:
    """Put a sampler of seed and epoch into the place of a loader's `RandomSampler`, if it has one.

    Mutates the loader's batch sampler, as accelerate does.
    """
    batches: Any = loader.sampler if isinstance(loader.sampler, BatchSampler) else loader.batch_sampler
    sampler = getattr(batches, "sampler", None)
    if isinstance(sampler, RandomSampler):
        batches.sampler = SeededOrder(sampler, seed)


def data_seed(args: TrainingArguments) -> int:
    """Return the seed of the order of the training data."""
    return args.seed if args.data_seed is None else args.data_seed


def usual_order(dataset: Any, args: TrainingArguments, collectives: Collectives, input_name: str) -> UsualOrder | None:
    """Return the order of the training data that the arguments name, as a sampler; None for iterable data."""
    if not is_map_style(dataset):
        return None
    strategy, grouping = args.train_sampling_strategy, None
    if strategy == "group_by_length":
        grouping = partial(_grouping, dataset, args, collectives, input_name)
    elif strategy == "random" and len(dataset):  # torch's refuses data without a sample
        return UsualRandomOrder(dataset)
    return UsualOrder(dataset, strategy, grouping)


def train_loader(
    dataset: Any,
    collate: Collate,
    args: TrainingArguments,
    collectives: Collectives,
    input_name: str = "input_ids",
    *,
    sampler: Any = None,
    batch_size: int | None = None,
) -> SeededLoader:
    """Build the loader of the training data: in the seeded order, or in the data's own order if requested.

    Raises:
        ValueError: samples are to be grouped by length, and have no length; or iterable data is to be put into an order
            other than its own.
    """
    strategy = args.train_sampling_strategy
    order: dict[str, Any] = {
        "seed": data_seed(args),
        "shuffle": strategy != "sequential",
        "own": None if isinstance(sampler, UsualOrder) else sampler,
        "follows_epoch": True,
    }
    if order["own"] is None and strategy == "group_by_length":
        order["grouping"] = _grouping(dataset, args, collectives, input_name)
    elif order["own"] is None and strategy == "random_computed":
        _check_has_no_order(dataset, strategy)
        order["computed"] = True
    return _loader(dataset, collate, args, collectives, batch_size or args.train_batch_size, **order)


def eval_loader(
    dataset: Any,
    collate: Collate,
    args: TrainingArguments,
    collectives: Collectives,
    *,
    sampler: Any = None,
    batch_size: int | None = None,
) -> SeededLoader:
    """Build the loader of evaluation data: every sample once, in order; or the samples of `sampler`."""
    order = {"seed": args.seed, "shuffle": False, "own": None if isinstance(sampler, UsualOrder) else sampler}
    return _loader(dataset, collate, args, collectives, batch_size or args.eval_batch_size, **order)


def is_map_style(dataset: Any) -> bool:
    """Whether samples can be read in any order."""
    return has_length(dataset) and not isinstance(dataset, IterableDataset)


def _check_has_no_order(dataset: Any, strategy: str) -> None:
    if not is_map_style(dataset):
        raise ValueError(
            f"train_sampling_strategy={strategy!r} puts samples into an order, but {type(dataset).__name__} is "
            "iterable data, which has its own; leave train_sampling_strategy out, or give data with __len__ and "
            "__getitem__"
        )


def _grouping(dataset: Any, args: TrainingArguments, collectives: Collectives, input_name: str) -> LengthGrouping:
    _check_has_no_order(dataset, "group_by_length")
    show = collectives.rank == 0 and not args.disable_tqdm
    lengths = measure_lengths(dataset, args.length_column_name, input_name, show=show)
    return LengthGrouping(
        lengths, args.train_batch_size * args.gradient_accumulation_steps * replicas(args, collectives)
    )


def _loader(
    dataset: Any,
    collate: Collate,
    args: TrainingArguments,
    collectives: Collectives,
    batch_size: int,
    *,
    seed: int,
    shuffle: bool,
    grouping: LengthGrouping | None = None,
    computed: bool = False,
    own: Any = None,
    follows_epoch: bool = False,
) -> SeededLoader:
    if isinstance(dataset, DataLoader):
        raise TypeError(
            "a DataLoader was given as a data set, and the Trainer builds its loaders itself; give it the data, "
            "loader.dataset, or return this loader from an override of get_train_dataloader, get_eval_dataloader or "
            "get_test_dataloader"
        )
    if hasattr(dataset, "iloc"):
        raise TypeError(
            f"the data set is a {type(dataset).__name__}, whose [0] is a column and no sample: give its rows, as "
            "datasets.Dataset.from_pandas(frame) or frame.to_dict('records')"
        )
    drop_last = args.dataloader_drop_last
    ranks: dict[str, Any] = {"rank": collectives.rank, "world_size": replicas(args, collectives)}
    workers = args.dataloader_num_workers
    options: dict[str, Any] = {
        "num_workers": workers,
        # Pinned memory speeds up copies to a device; without a device it is a wasted copy.
        "pin_memory": args.dataloader_pin_memory and collectives.device.type == "cuda",
        "persistent_workers": args.dataloader_persistent_workers and workers > 0,
        "prefetch_factor": args.dataloader_prefetch_factor,
        "multiprocessing_context": args.dataloader_multiprocessing_context if workers else None,
        "worker_init_fn": (ignore_group_signals if saves_on_signal(args) else end_with_parent) if workers else None,
        # The loader draws its workers' base seed from here, not from the stream that dropout uses.
        "generator": torch.Generator().manual_seed(seed),
    }
    if is_map_style(dataset):
        if workers and isinstance(collate, KeepColumns) and len(dataset):
            collate.look_ahead(dataset)
        shards = VirtualShards.of(args, collectives, trains=follows_epoch)
        fixed: dict[str, Any] = {"seed": seed, "drop_last": drop_last, "shards": shards, **ranks}
        if own is None:
            order = {"shuffle": shuffle, "grouping": grouping, "computed": computed}
            sampler = EpochSampler(len(dataset), batch_size, **order, **fixed)
        else:
            sampler = UserSampler(own, batch_size, **fixed)
        return SampledLoader(dataset, sampler, collate, follows_epoch=follows_epoch, **options)
    if own is not None:
        raise ValueError(
            f"{type(own).__name__}, which a sampler method of the Trainer returned, puts samples into an order, but "
            f"{type(dataset).__name__} is iterable data, which has its own; return None for it"
        )
    stream = StreamFetch(dataset, collate, batch_size, seed=seed, drop_last=drop_last, **ranks)
    return StreamLoader(stream, **options)


class LoaderCache:
    """Cache of loaders with persistent worker processes (`dataloader_persistent_workers`)."""

    def __init__(self) -> None:
        self._kept: dict[Hashable, tuple[tuple[Any, ...], SeededLoader]] = {}

    def get(self, name: Hashable, made_of: tuple[Any, ...], build: Callable[[], SeededLoader]) -> SeededLoader:
        """Return the cached loader of a name if it was built from the same objects, else build it."""
        earlier, kept = self._kept.get(name, ((), None))
        if kept is not None and all(map(is_, earlier, made_of)):
            return kept
        loader = build()
        if loader.persistent_workers:
            self._kept[name] = (made_of, loader)
        return loader


def keeping_columns(
    collate: Collate, columns: list[str] | None, model: nn.Module, logged: set[frozenset[str]]
) -> Collate:
    """Return a collator that hides all but these columns, if any are named; see `KeepColumns`."""
    return collate if columns is None else KeepColumns(collate, columns, type(base_model(model)).__name__, logged)
