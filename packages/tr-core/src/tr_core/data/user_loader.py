"""Iterate over a loader that the user made, and resume inside its epoch with the same batches."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypedDict

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler
from torch.utils.data._utils import fetch
from torch.utils.data.dataloader import _InfiniteConstantSampler

from tr_core.data.fetch import epoch_listeners
from tr_core.data.sampler import EpochSampler, MicroBatch
from tr_core.protocols import Collectives
from tr_core.random_state import RandomState, find_generators, find_inside, read_states, write_states
from tr_log import get_logger, progress

logger = get_logger(__name__)

_END = object()


class EpochStart(TypedDict):
    """Generator states from which a loader drew its order, right before its samplers got the epoch.

    Attributes:
        host: the host's global generators.
        generators: those that the loader holds, by attribute path.
        workers_live: whether its worker processes were running already (`persistent_workers`).
    """

    epoch: int
    host: dict[str, Any]
    generators: dict[str, Any]
    workers_live: bool


class UserLoader:
    """Epochs over a user's loader, in the loader's own order.

    A sampler draws its order in `set_epoch`, when an epoch begins, or batch by batch, from a global generator or one
    that the loader holds. A checkpoint therefore holds the generator states of the moment before all this. A resume
    restores them, calls `set_epoch`, iterates over the loader and skips the batches up to the position. Then it
    restores all generators, also new ones, to their states at the save. A loader with a `state_dict` resumes from that
    instead.

    Each rank has a loader of its own, and all ranks take part in every micro-batch. Where their numbers of batches
    differ, or are unknown, they end together, with the longest: a rank that has no batch left computes one of another
    rank, which counts nothing.

    Two things do not repeat. One is an order drawn batch by batch from torch's global generator, because dropout draws
    from it in between. The other is random numbers that persistent worker processes draw themselves.
    """

    def __init__(self, loader: Any, batch_size: int, collectives: Collectives, *, follows_epoch: bool = False) -> None:
        self._loader, self._collectives, self._follows_epoch = loader, collectives, follows_epoch
        self.samples_per_micro_batch = batch_size * collectives.world_size
        self._source, self._is_there = StatefulSource(loader), False
        self._beginning: EpochStart | None = None
        self._at_save: dict[str, Any] | None = None  # generator states of the save that the next epoch resumes from
        self._workers_lived = False  # at the save that the run resumes from
        lengths = collectives.gather_objects(_length(loader))
        self.num_batches: int | None = None if None in lengths else max(lengths)
        self._ends_apart = len(lengths) > 1 and (None in lengths or len(set(lengths)) > 1)
        self.num_samples = None if self.num_batches is None else self.num_batches * self.samples_per_micro_batch

    def remaining(self, position: int) -> int | None:
        """Count the micro-batches of an epoch after `position` samples; None if unknown."""
        if self.num_batches is None:
            return None
        return max(self.num_batches - position // self.samples_per_micro_batch, 0)

    def iterate(self, epoch: int, position: int) -> Iterator[MicroBatch]:
        """Return the micro-batches of an epoch after `position` samples.

        The iteration begins at once, and reads the first batch of a whole epoch: before the events of its step, whose
        callbacks may draw random numbers or seed them.
        """
        if self._is_there and position == 0:
            self._come_to_the_end()
        first, batches = self._begin(epoch, 0 if self._is_there else position // self.samples_per_micro_batch)
        return self._rest(first, batches, epoch, position)

    def _rest(self, first: list[Any], batches: Iterator[Any], epoch: int, position: int) -> Iterator[MicroBatch]:
        inputs = None
        while True:
            if inputs is not _END:
                inputs = first.pop() if first else self._next(batches, epoch, position)
            batch, weight = self._with_others(inputs) if self._ends_apart else (inputs, 1.0)
            if batch is _END:
                return
            position += self.samples_per_micro_batch
            yield MicroBatch(batch, weight, position, None)

    def order_state(self) -> dict[str, Any]:
        """Return nothing: the order's generators are part of this rank's `source_state`."""
        return {}

    def restore_order(self, state: Mapping[str, Any], position: int) -> None:
        """Do nothing: there is nothing to restore."""

    def source_state(self) -> dict[str, Any]:
        """Return the loader's own state, if any, and the states of its generators."""
        return {
            "state": self._source.state_dict(),
            "beginning": self._beginning,
            "generators": read_states(find_generators(self._loader)),
            "workers_live": self._has_live_workers(),
        }

    def restore_source(self, places: Sequence[Any], rank: int, world_size: int, *, in_epoch: bool = True) -> None:
        """Set the next epoch to begin at this rank's saved state, or restore the generators after a whole epoch."""
        if len(places) != world_size:
            if in_epoch:
                logger.warning(
                    "the checkpoint is inside an epoch of %d processes over a loader of your own, now there are %d: "
                    "the random state that its order was drawn from belongs to another number of processes and is "
                    "not restored, so that samples may be repeated or left out where the order is random",
                    len(places),
                    world_size,
                )
            return
        place = places[rank]
        if place is None or "beginning" not in place:  # of another kind of data
            if in_epoch:
                logger.warning(
                    "the checkpoint does not hold what the order of your own loader was drawn from: the rest of this "
                    "epoch has the samples that were left only where the order is not random"
                )
            return
        self._workers_lived = place["workers_live"]
        if in_epoch:
            self._beginning, self._at_save = place["beginning"], place["generators"]
            if self._source.is_known and place["state"] is not None and _state_has_order(self._loader):
                self._source.load_state_dict(place["state"])  # may draw random numbers
                self._is_there = True
        generators = find_generators(self._loader)
        self._check_same(generators, place["generators"])
        write_states(generators, place["generators"])

    def _with_others(self, inputs: Any) -> tuple[Any, float]:
        """Return the batch to compute, and its weight: that of another rank, and 0, if this one has none left.

        Collective: one exchange of numbers, on the host.
        """
        rank, world_size = self._collectives.rank, self._collectives.world_size
        has_one = self._collectives.all_reduce_max(
            [number == rank and inputs is not _END for number in range(world_size)]
        )()
        if not any(has_one):
            return _END, 0.0
        if all(has_one):
            return inputs, 1.0
        giver = has_one.index(True)
        given = self._collectives.gather_objects(inputs if rank == giver else None)[giver]
        return (given, 0.0) if inputs is _END else (inputs, world_size / sum(has_one))

    def _begin(self, epoch: int, skipped: int) -> tuple[list[Any], Iterator[Any]]:
        """Return the batches after the first `skipped`; the first of them may be separate.

        A resumed epoch repeats its order.
        """
        beginning, at_save, is_there = self._beginning, self._at_save, self._is_there
        self._at_save, self._is_there = None, False
        if beginning is None or beginning["epoch"] != epoch:
            if self._workers_lived:
                self._have_workers(live=True)
            states, live = read_states(find_generators(self._loader)), self._has_live_workers()
            host = _host().state_dict()
            self._beginning = EpochStart(epoch=epoch, host=host, generators=states, workers_live=live)
            self._set_epoch(epoch)
            if not skipped:
                batches = iter(self._loader)
                return [self._next(batches, epoch, 0)], batches
            now = _all().state_dict()  # of a checkpoint without the states of the beginning
            batches = skip_batches(iter(self._loader), skipped)
            _all().load_state_dict(now)
            return [], batches
        self._have_workers(live=beginning["workers_live"])
        now = _all().state_dict()
        _host().load_state_dict(beginning["host"])
        write_states(find_generators(self._loader), beginning["generators"])
        self._set_epoch(epoch)
        batches = skip_batches(iter(self._loader), skipped)
        # Samplers draw at their first index. A loader restored by its state has done so already.
        first = [] if skipped or is_there else [next(batches, _END)]
        _all().load_state_dict(now)
        if at_save is not None:  # other code may draw from them too
            write_states(find_generators(self._loader), at_save)
        return first, batches

    def _next(self, batches: Iterator[Any], epoch: int, position: int) -> Any:
        try:
            return next(batches)
        except StopIteration as stop:
            if self._was_raised_by_data(stop):
                raise RuntimeError(
                    f"{self._where(epoch, position)}: the data set or the collator raised StopIteration, which ends "
                    "the epoch there and would leave samples out; raise another error, such as IndexError"
                ) from stop
            return _END
        except Exception as error:
            error.add_note(f"raised in {self._where(epoch, position)}")
            raise

    def _where(self, epoch: int, position: int) -> str:
        name = type(self._loader).__name__
        return f"batch {position // self.samples_per_micro_batch} of epoch {epoch} of a {name} of your own"

    def _was_raised_by_data(self, stop: StopIteration) -> bool:
        if not isinstance(self._loader, DataLoader) or isinstance(self._loader.dataset, IterableDataset):
            return False
        if "in DataLoader worker process" in str(stop):
            return True
        trace = stop.__traceback__
        while trace is not None:
            if trace.tb_frame.f_code.co_filename == fetch.__file__:
                return True
            trace = trace.tb_next
        return False

    def _set_epoch(self, epoch: int) -> None:
        listeners = _samplers(self._loader)
        if self._follows_epoch:
            inside = epoch_listeners(getattr(self._loader, "dataset", None))
            listeners += inside
            if inside and epoch and self._has_live_workers():
                logger.warning(
                    "the worker processes of your loader live on (persistent_workers=True) and keep the copy of the "
                    "data set that they were started with: set_epoch(%d) does not reach it. Leave persistent_workers "
                    "out, or have the Trainer build the loader",
                    epoch,
                )
        for listener in {id(listener): listener for listener in listeners}.values():
            listener.set_epoch(epoch)

    def _come_to_the_end(self) -> None:
        """Iterate a loader whose restored state is the end of an epoch to that end."""
        self._iterate_apart()
        self._is_there = False

    def _iterate_apart(self) -> None:
        """Start an iteration over the loader, and restore all generators afterwards."""
        now, generators = _all().state_dict(), find_generators(self._loader)
        held = read_states(generators)
        next(iter(self._loader), None)
        _all().load_state_dict(now)
        write_states(generators, held)

    def _has_live_workers(self) -> bool:
        loader = self._loader
        is_kept = getattr(loader, "persistent_workers", False) and getattr(loader, "num_workers", 0)
        return bool(is_kept) and getattr(loader, "_iterator", None) is not None

    def _have_workers(self, *, live: bool) -> None:
        """Match persistent workers to the save: a loader's first iteration draws more random numbers than others."""
        if live == self._has_live_workers():
            return
        if not live:
            self._loader._iterator = None
            return
        logger.info(
            "the worker processes of your loader live on (persistent_workers=True): what they draw at random went on "
            "from epoch to epoch, and begins again in the resumed run. The order of the samples is what it was"
        )
        self._iterate_apart()

    def _check_same(self, generators: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
        if missing := sorted(set(saved) - set(generators)):
            logger.warning(
                "the loader of the saved run had random number generators at %s, this one has none there: what it "
                "draws may be something else",
                missing,
            )


def _length(loader: Any) -> int | None:
    try:
        return len(loader)
    except TypeError:  # no length, or the length of an iterable data set
        return None


def _host() -> RandomState:
    return RandomState(torch.device("cpu"))


def _all() -> RandomState:
    """Return the state of the host and of the GPU in use: skipped batches may draw from both."""
    return RandomState(torch.device("cuda" if torch.cuda.is_initialized() else "cpu"))


def skip_batches(batches: Iterator[Any], number: int) -> Iterator[Any]:
    """Draw and drop `number` batches with a progress bar: this can take as long as the training did."""
    for _ in progress(range(number), total=number, description="skipping data already used") if number else ():
        next(batches, None)
    return batches


_IN_ORDER = (SequentialSampler, _InfiniteConstantSampler, list, tuple, range, type(None))


def _state_has_order(loader: Any) -> bool:
    """Whether a loader's state holds its order, so that its next iteration begins there with nothing left to draw.

    torchdata's loader makes other samplers than torch's and its own draw twice. In a batch sampler that has no state it
    skips when the first batch is asked for, and draws the order then.
    """
    batch_sampler, sampler = getattr(loader, "batch_sampler", None), getattr(loader, "sampler", None)
    outer, inner = sampler if batch_sampler is None else batch_sampler, getattr(batch_sampler, "sampler", sampler)
    if hasattr(outer, "state_dict"):
        return True
    if _library(outer) == "torchdata":
        is_known = type(inner) in _IN_ORDER or _library(inner) in ("torch", "torchdata")
        return is_known or hasattr(inner, "state_dict")
    return type(outer) in (BatchSampler, *_IN_ORDER) and type(inner) in _IN_ORDER


def _library(thing: Any) -> str:
    return type(thing).__module__.split(".")[0]


def _samplers(loader: Any) -> list[Any]:
    """Return the objects that take the number of the epoch: the loader, its nested samplers, and ours inside it."""
    found, owner = list(find_inside(loader, (EpochSampler,)).values()), loader
    for _ in range(3):
        found += [owner, getattr(owner, "sampler", None)]
        owner = getattr(owner, "batch_sampler", None)
    return [each for each in found if callable(getattr(each, "set_epoch", None))]


# Parts of the `datasets` library whose state omits their buffered samples, which would be lost.
_LOSE_SAMPLES = ("BufferShuffled",)
_INNER = "ex_iterable"


class StatefulSource:
    """The position of a data set or loader in its epoch, by its own `state_dict` and `load_state_dict`."""

    def __init__(self, source: Any) -> None:
        self._source, self._beginning = source, None
        has_methods = all(callable(getattr(source, name, None)) for name in ("state_dict", "load_state_dict"))
        self.is_known = has_methods and not _loses_samples(source)

    def state_dict(self) -> Any:
        """Return the state after the last sample that was read; None if unknown."""
        if not self.is_known:
            return None
        try:
            return copy.deepcopy(self._source.state_dict())
        except Exception as error:  # accelerate's loaders have the method, but not always a state
            self.is_known = False
            logger.info(
                "state_dict of %s raised %s (%s): a resumed run will read its data from the beginning of the epoch to "
                "its place",
                type(self._source).__name__,
                type(error).__name__,
                error,
            )
            return None

    def load_state_dict(self, state: Any) -> None:
        """Load a state; the next iteration begins there."""
        self._beginning = self.state_dict()
        self._source.load_state_dict(state)

    def begin(self) -> None:
        """Set the next iteration to begin at the start: some data would begin at a loaded state every time."""
        if self._beginning is not None:
            self._source.load_state_dict(self._beginning)
            self._beginning = None


def _loses_samples(source: Any) -> bool:
    inner = getattr(source, "_ex_iterable", None)
    while inner is not None:
        if type(inner).__name__.startswith(_LOSE_SAMPLES):
            logger.info(
                "the samples in the shuffle buffer of %s are not part of its state: a resumed run will read its data "
                "from the beginning of the epoch to the saved position, and use the same samples from there on",
                type(source).__name__,
            )
            return True
        inner = getattr(inner, _INNER, None)
    return False
