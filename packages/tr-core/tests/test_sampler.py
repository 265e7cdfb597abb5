"""The order of the samples: which sample comes when, on which rank, from any position."""

import pickle

import pytest
import torch

from tr_core.data.length_grouping import LengthGrouping
from tr_core.data.sampler import Batch, EpochSampler, UserSampler, permutation, take_slice


def order_of(sampler):
    return [list(batch) for batch in sampler]


def test_the_order_is_a_pure_function_of_seed_and_epoch():
    assert torch.equal(permutation(10, 42, 1), permutation(10, 42, 1))
    assert not torch.equal(permutation(10, 42, 1), permutation(10, 42, 2))
    assert not torch.equal(permutation(10, 42, 1), permutation(10, 44, 1))
    state = torch.get_rng_state()
    permutation(10, 42, 1)
    assert torch.equal(state, torch.get_rng_state())


KINDS = {"random": {}, "computed": {"computed": True}, "grouped": {"grouping": None}}


def sampler_of(kind, number, rank=0, world_size=1):
    options = dict(KINDS[kind])
    if "grouping" in options:
        lengths = torch.randint(1, 60, (number,), generator=torch.Generator().manual_seed(0))
        options["grouping"] = LengthGrouping(lengths, 8)
    return EpochSampler(number, 4, shuffle=True, seed=3, rank=rank, world_size=world_size, **options)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("number", [1, 7, 16, 17, 43, 400, 5003])
def test_ranks_share_one_order_from_any_position_and_use_each_sample_once(kind, number, world_size):
    whole = sampler_of(kind, number)
    whole.seek(2)
    expected = [int(index) for index in whole.order()]
    assert sorted(expected) == list(range(number))
    for position in (0, 3, min(12, number), number // 2):
        ranks = [sampler_of(kind, number, rank, world_size) for rank in range(world_size)]
        for sampler in ranks:
            sampler.seek(2, position)
        used = []
        for round_number, batches in enumerate(zip(*map(list, ranks), strict=True)):
            for rank, batch in enumerate(batches):
                share = take_slice(round_number, position, number, 4, rank, world_size)
                used += batch if share.weight else []
        assert used == expected[position:]


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


def weighted():
    return torch.utils.data.WeightedRandomSampler([1.0, 5.0] * 15, num_samples=23)


def test_a_random_sampler_has_the_same_order_on_all_ranks_and_from_any_position():
    def batches(epoch, position=0, rank=0, world_size=1, size=4):
        sampler = UserSampler(weighted(), size, seed=3, rank=rank, world_size=world_size)
        sampler.seek(epoch, position)
        torch.manual_seed(epoch * 100 + position + rank)  # whatever the process drew before
        return [list(batch) for batch in sampler]

    whole = [index for batch in batches(0) for index in batch]
    assert len(whole) == 23
    assert [index for batch in batches(0, 8) for index in batch] == whole[8:]
    first, second = batches(0, rank=0, world_size=2, size=2), batches(0, rank=1, world_size=2, size=2)
    assert [index for pair in zip(first, second, strict=True) for batch in pair for index in batch] == whole
    assert [index for batch in batches(1) for index in batch] != whole


def test_a_sampler_takes_no_random_number_from_the_run():
    sampler = UserSampler(weighted(), 4, seed=3)
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    list(sampler)
    assert torch.equal(torch.rand(1), expected)
