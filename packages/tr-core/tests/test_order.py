import pickle

import pytest
import torch
from torch.utils.data import DataLoader

from tr_core.data.fetch import MapFetch, StreamFetch, identity
from tr_core.data.sampler import Batch, EpochSampler, SampledBatches, permutation, take_slice


def order_of(sampler):
    return [list(batch) for batch in sampler]


def test_the_order_is_a_pure_function_of_seed_and_epoch():
    assert torch.equal(permutation(10, 42, 1), permutation(10, 42, 1))
    assert not torch.equal(permutation(10, 42, 1), permutation(10, 42, 2))
    assert not torch.equal(permutation(10, 42, 1), permutation(10, 44, 1))
    state = torch.get_rng_state()
    permutation(10, 42, 1)
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("number", [1, 7, 16, 17, 40])
def test_every_sample_is_used_once_whatever_the_world_size(world_size, number):
    samplers = [
        EpochSampler(number, 4, shuffle=True, seed=1, rank=rank, world_size=world_size) for rank in range(world_size)
    ]
    passes = [list(sampler) for sampler in samplers]
    assert len({len(batches) for batches in passes}) == 1
    used = []
    for rank, batches in enumerate(passes):
        for index, batch in enumerate(batches):
            share = take_slice(index, 0, number, 4, rank, world_size)
            used += batch if share.weight else []
    assert sorted(used) == list(range(number))


def test_all_world_sizes_share_one_global_order():
    whole = [i for batch in order_of(EpochSampler(32, 8, shuffle=True, seed=3)) for i in batch]
    halves = [order_of(EpochSampler(32, 4, shuffle=True, seed=3, rank=r, world_size=2)) for r in range(2)]
    assert [i for pair in zip(*halves, strict=True) for batch in pair for i in batch] == whole


@pytest.mark.parametrize("position", [0, 3, 8, 12])
def test_an_epoch_goes_on_from_any_sample_with_any_batch_size(position):
    whole = permutation(20, 5, 2).tolist()
    sampler = EpochSampler(20, 3, shuffle=True, seed=5)
    sampler.seek(2, position)
    assert [i for batch in sampler for i in batch] == whole[position:]


def test_drop_last_leaves_out_the_short_micro_batch():
    assert order_of(EpochSampler(10, 4, shuffle=False, seed=0, drop_last=True)) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert len(EpochSampler(10, 4, shuffle=False, seed=0, drop_last=True)) == 2
    assert len(EpochSampler(10, 4, shuffle=False, seed=0)) == 3


def test_weights_make_the_mean_over_ranks_the_mean_over_samples():
    shares = [take_slice(0, 0, 5, 4, rank, 2) for rank in range(2)]
    values = torch.arange(5.0)
    means = [values[s.start : s.stop].mean() * s.weight for s in shares]
    assert torch.isclose(sum(means) / 2, values.mean())
    assert [share.weight for share in (take_slice(0, 0, 8, 4, rank, 2) for rank in range(2))] == [1.0, 1.0]


def test_a_rank_without_a_sample_repeats_one_with_weight_zero():
    shares = [take_slice(0, 0, 1, 4, rank, 2) for rank in range(2)]
    assert [(s.start, s.stop, s.weight) for s in shares] == [(0, 1, 0.0), (0, 1, 2.0)]


def test_a_batch_keeps_its_seed_on_the_way_to_a_worker():
    batch = Batch([1, 2])
    batch.seed = 9
    again = pickle.loads(pickle.dumps(batch))
    assert (list(again), again.seed) == ([1, 2], 9)


def test_resuming_at_sample_ten_million_touches_no_earlier_sample():
    class Counted:
        touched = 0

        def __len__(self):
            return 10_000_004

        def __getitem__(self, index):
            self.touched += 1
            return index

    dataset = Counted()
    sampler = EpochSampler(len(dataset), 4, shuffle=False, seed=0)
    loader = DataLoader(MapFetch(dataset, list), batch_sampler=sampler, collate_fn=identity)
    batches = list(SampledBatches(loader, sampler).iterate(0, 10_000_000))
    assert [batch.inputs for batch in batches] == [[10_000_000, 10_000_001, 10_000_002, 10_000_003]]
    assert dataset.touched == 4


@pytest.mark.parametrize("workers", [0, 2])
def test_what_is_drawn_while_loading_depends_on_the_place_alone(workers):
    def noisy(samples):
        return torch.tensor([float(sample) for sample in samples]) + torch.rand(len(samples))

    def load(position):
        sampler = EpochSampler(20, 2, shuffle=True, seed=1)
        sampler.seek(3, position)
        loader = DataLoader(
            MapFetch(list(range(20)), noisy), batch_sampler=sampler, collate_fn=identity, num_workers=workers
        )
        return list(loader)

    whole, rest = load(0), load(8)
    assert all(torch.equal(a, b) for a, b in zip(whole[4:], rest, strict=True))
    assert not torch.equal(whole[0], whole[0].round())


def test_loading_in_this_process_leaves_its_generators_alone():
    fetch = MapFetch([1.0] * 8, lambda samples: torch.rand(len(samples)))
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    batch = Batch([0, 1])
    fetch.__getitems__(batch)
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_ranks_share_a_stream_without_loss_or_repetition(world_size):
    used = []
    for rank in range(world_size):
        stream = StreamFetch(list(range(17)), list, 2, seed=0, rank=rank, world_size=world_size)
        for round_number, (inputs, total) in enumerate(stream):
            share = take_slice(0, 0, total, 2, rank, world_size)
            used += inputs if share.weight else []
            assert total == min(2 * world_size, 17 - round_number * 2 * world_size)
    assert sorted(used) == list(range(17))


def test_a_stream_is_passed_over_by_reading_without_collating():
    collated = []
    stream = StreamFetch(list(range(12)), lambda samples: collated.append(samples) or samples, 2, seed=0)
    assert stream.seek(0, 6) == 3
    assert [inputs for inputs, _ in stream] == [None, None, None, [6, 7], [8, 9], [10, 11]]
    assert collated == [[6, 7], [8, 9], [10, 11]]


def test_a_stream_that_cannot_be_split_where_it_stopped_says_what_to_do():
    stream = StreamFetch(list(range(12)), list, 4, seed=0)
    stream.seek(0, 6)
    loader = DataLoader(stream, batch_size=None, num_workers=2, collate_fn=identity)
    with pytest.raises(ValueError, match=r"2 samples into a micro-batch of 4 with 2 workers; .*num_workers=0"):
        list(loader)
