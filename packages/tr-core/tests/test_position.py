"""Data that knows its position resumes there; other data is read from the beginning of the epoch."""

import logging

import pytest
import torch
from support.data import Stream
from support.ranks import Alike
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from tr_core.data.batches import batches_of
from tr_core.data.fetch import StreamFetch
from tr_core.data.loaders import StreamLoader
from tr_core.data.position import derive_position
from tr_core.data.sampler import EpochSampler, SampledBatches
from tr_core.data.user_loader import StatefulSource


class Counting(IterableDataset):
    """Gives numbers, notes which were read, and can tell its position."""

    def __init__(self, number=22):
        self.number, self.next, self.read = number, 0, []

    def __iter__(self):
        while self.next < self.number:
            self.next += 1
            self.read.append(self.next - 1)
            yield self.next - 1
        self.next = 0

    def state_dict(self):
        return {"next": self.next}

    def load_state_dict(self, state):
        self.next = state["next"]


class Sticky(Counting):
    """Begins every epoch at the position that was loaded last, as some libraries' data does."""

    def __init__(self, number=22):
        super().__init__(number)
        self.begin = 0

    def __iter__(self):
        for value in range(self.begin, self.number):
            self.next = value + 1
            self.read.append(value)
            yield value

    def load_state_dict(self, state):
        self.begin = self.next = state["next"]


class Divided(IterableDataset):
    """Worker processes divide it, unevenly."""

    def __iter__(self):
        worker = get_worker_info()
        return iter(range(worker.id, 21, worker.num_workers))


def draw(samples):
    return samples, torch.randn(1).item()


def stream(dataset, batch_size=4, workers=0, rank=0, world_size=1):
    fetch = StreamFetch(dataset, draw, batch_size, seed=3, rank=rank, world_size=world_size)
    loader = StreamLoader(fetch, num_workers=workers)
    return batches_of(loader, batch_size, Alike(world_size))


def take(batches, number, epoch=0, position=0):
    """Return the first micro-batches of an epoch from a position, and the position after them."""
    taken = []
    for batch in batches.iterate(epoch, position):
        taken.append(batch.inputs)
        position = batch.end
        if len(taken) == number:
            break
    return taken, position


@pytest.mark.parametrize("kind", [Counting, Sticky])
@pytest.mark.parametrize("rounds", [1, 3, 5])
def test_data_that_knows_its_position_continues_there_and_reads_nothing_before_it(kind, rounds):
    whole, _ = take(stream(kind()), 99)
    begun = stream(kind())
    _, position = take(begun, rounds)
    order, source = begun.order_state(), begun.source_state()
    data = kind()
    resumed = stream(data)
    resumed.restore_order(order, position)
    resumed.restore_source([source], 0, 1)
    assert take(resumed, 99, position=position)[0] == whole[rounds:]
    assert data.read == list(range(rounds * 4, 22))
    assert take(resumed, 99, epoch=1)[0] == take(stream(kind()), 99, epoch=1)[0]


@pytest.mark.parametrize("kind", [Counting, Sticky])
def test_an_error_after_a_resume_names_the_samples_number_in_the_whole_epoch(kind, monkeypatch):
    begun = stream(kind())
    _, position = take(begun, 3)

    def draw(samples):
        raise ValueError("no such sample")

    monkeypatch.setitem(globals(), "draw", draw)
    resumed = stream(kind())
    resumed.restore_order(begun.order_state(), position)
    resumed.restore_source([begun.source_state()], 0, 1)
    with pytest.raises(ValueError, match="no such sample") as caught:
        take(resumed, 1, position=position)
    assert any("samples 12 to 15 of the stream" in note for note in caught.value.__notes__)


@pytest.mark.parametrize("workers", [0, 2])
def test_every_batch_of_a_stream_draws_numbers_of_its_own(workers):
    kind = Divided if workers else Counting
    drawn = [number for epoch in (0, 1) for _, number in take(stream(kind(), workers=workers), 99, epoch=epoch)[0]]
    assert len(drawn) >= 12
    assert len(set(drawn)) == len(drawn)


@pytest.mark.parametrize("knows_the_end", [True, False])
@pytest.mark.parametrize("kind", [Counting, Sticky])
def test_a_position_at_the_end_of_an_epoch_leaves_the_next_epoch_whole(kind, knows_the_end):
    begun = stream(kind())
    _, position = take(begun, 99 if knows_the_end else 6)
    resumed = stream(kind())
    if knows_the_end:
        resumed.restore_order(begun.order_state(), position)
    resumed.restore_source([begun.source_state()], 0, 1)
    assert take(resumed, 99, epoch=1)[0] == take(stream(kind()), 99, epoch=1)[0]


def test_a_position_serves_another_batch_size_too():
    begun = stream(Counting())
    _, position = take(begun, 3)
    data = Counting()
    resumed = stream(data, batch_size=5)
    resumed.restore_order(begun.order_state(), position)
    resumed.restore_source([begun.source_state()], 0, 1)
    batches, _ = take(resumed, 99, position=position)
    assert [samples for samples, _ in batches] == [[12, 13, 14, 15, 16], [17, 18, 19, 20, 21]]
    assert data.read[0] == 12
    plain = stream(Counting(), batch_size=5)
    assert take(plain, 99, position=position)[0] == batches  # random numbers too


def test_any_ranks_position_in_a_shared_stream_serves_another_number_of_ranks():
    begun = stream(Counting(), batch_size=2, rank=1, world_size=2)
    _, position = take(begun, 2)
    resumed = stream(Counting(), batch_size=4)
    resumed.restore_source([begun.source_state(), None], 0, 1)
    assert take(resumed, 1, position=position)[0][0][0] == [8, 9, 10, 11]


@pytest.mark.parametrize("rounds", range(1, 6))
def test_short_rounds_in_the_middle_of_an_epoch_are_counted(rounds):
    whole, _ = take(stream(Divided(), workers=2), 99)
    assert [len(samples) for samples, _ in whole] == [4, 4, 4, 4, 3, 2]  # worker 0 ends before worker 1 does
    begun = stream(Divided(), workers=2)
    _, position = take(begun, rounds)
    resumed = stream(Divided(), workers=2)
    resumed.restore_order(begun.order_state(), position)
    assert take(resumed, 99, position=position)[0] == whole[rounds:]


@pytest.mark.parametrize(("workers", "batch_size"), [(1, 4), (0, 4), (2, 5)])
def test_data_that_processes_divide_is_not_continued_in_another_division(workers, batch_size):
    begun = stream(Divided(), workers=2)
    _, position = take(begun, 2)
    resumed = stream(Divided(), workers=workers, batch_size=batch_size)
    message = "8 samples into an epoch of iterable data that 2 processes read in turn, 4 samples at a time; "
    with pytest.raises(ValueError, match=f"{message}{max(workers, 1)} that read {batch_size} at a time would repeat"):
        resumed.restore_order(begun.order_state(), position)
    resumed.restore_order(begun.order_state(), 0)  # an epoch that begins may be divided as it likes


def test_a_loader_that_knows_its_position_is_put_back_there():
    class Loader:
        def __init__(self):
            self.data = Counting()

        def __len__(self):
            return 22

        def __iter__(self):
            return iter(self.data)

        def state_dict(self):
            return self.data.state_dict()

        def load_state_dict(self, state):
            self.data.load_state_dict(state)

    begun = batches_of(Loader(), 1, Alike(2))
    _, position = take(begun, 5)
    resumed = batches_of(loader := Loader(), 1, Alike(2))
    resumed.restore_source([None, begun.source_state()], 1, 2)
    assert take(resumed, 3, position=position) == ([5, 6, 7], 16)
    assert loader.data.read[0] == 5
    other = batches_of(loader := Loader(), 1, Alike())  # of another number of ranks no state is this rank's
    other.restore_source([begun.source_state(), begun.source_state()], 0, 1)
    assert take(other, 1, position=10)[0] == [10]
    assert loader.data.read[0] == 0


def test_data_whose_state_leaves_samples_out_is_read_again(caplog):
    class BufferShuffledExamples:
        ex_iterable = None

    class Shuffled(Counting):
        _ex_iterable = BufferShuffledExamples()

    with caplog.at_level(logging.INFO, logger="tr_core"):
        source = StatefulSource(Shuffled())
    assert not source.is_known
    assert source.state_dict() is None


def test_data_without_a_state_has_no_position():
    assert StatefulSource([1, 2]).state_dict() is None
    assert stream(Divided(), workers=2).source_state() is None


# The position of a run that another program began


def data_of(samples, batch_size, world_size=1, drop_last=False):
    options = {"shuffle": True, "seed": 0, "drop_last": drop_last, "world_size": world_size}
    sampler = EpochSampler(samples, batch_size, **options)
    return SampledBatches(DataLoader(list(range(samples)), batch_sampler=sampler), sampler)


def saved(step, epoch=None, size=None, world_size=1, max_steps=None):
    named = {"global_step": step, "epoch": epoch, "train_batch_size": size}
    return {**named, "world_size": world_size, "max_steps": max_steps}


@pytest.mark.parametrize(
    ("step", "position"), [(0, (0, 0)), (1, (0, 8)), (2, (0, 16)), (3, (1, 0)), (5, (1, 16)), (6, (2, 0))]
)
def test_a_step_leads_to_whole_epochs_and_the_micro_batches_of_its_steps(step, position):
    """Five micro-batches of 4 make three steps of two, the last of one."""
    data = data_of(18, 4)
    assert derive_position(saved(step), data, 8) == position
    epoch = position[0] + position[1] / 4 / 5
    assert derive_position(saved(step, epoch, 4), data, 8) == position


@pytest.mark.parametrize("batch_size", [1, 2, 4, 6])
@pytest.mark.parametrize("accumulation", [1, 2, 3])
def test_with_another_batch_size_or_accumulation_it_is_where_the_share_of_the_epoch_says(batch_size, accumulation):
    """The run was 3 micro-batches of 4 into the second of two epochs of 18 samples, one a step."""
    position = derive_position(saved(8, 1 + 3 / 5, 4), data_of(18, batch_size), batch_size * accumulation)
    assert position == (1, 12)


def test_the_number_of_processes_of_the_saved_run_counts(tmp_path):
    """Two processes with 2 samples each."""
    assert derive_position(saved(3, 3 / 5, 2, world_size=2), data_of(18, 3), 3) == (0, 12)


def test_a_short_last_batch_that_was_left_out_is_no_part_of_an_epoch():
    position = derive_position(saved(6, 1 + 2 / 4, 4), data_of(18, 3, drop_last=True), 3)
    assert position == (1, 8)


def test_a_position_that_fits_nothing_is_refused_with_the_figures():
    message = "at epoch 0.77 after 3 steps, which fits neither 5 micro-batches an epoch with 1 a step"
    with pytest.raises(ValueError, match=message):
        derive_position(saved(3, 0.77, 4), data_of(18, 4), 4)
    with pytest.raises(ValueError, match="nor the None samples a device on 1 processes"):
        derive_position(saved(3, 0.77), data_of(18, 4), 4)


@pytest.mark.parametrize(("epoch", "position"), [(None, (0, 40)), (3 / 8, (0, 24)), (1 + 2 / 8, (1, 16))])
def test_data_of_unknown_length_is_at_the_share_of_the_run_in_its_epoch(epoch, position):
    data = batches_of(DataLoader(Stream(range(12)), batch_size=4), 4, Alike())
    assert derive_position(saved(5, epoch, 4, max_steps=8), data, 8) == position
