"""An order that is computed for a place: every sample once, mixed as a random permutation is, at no cost of its own."""

import copy
import math
import tracemalloc
from collections import Counter

import numpy as np
import pytest
import torch
from support.callbacks import Stop, StopAt
from support.checkpointer import MemoryCheckpointer
from support.data import Stream
from support.models import Classifier

from tr_core import Trainer
from tr_core.data import sampler as sampler_module
from tr_core.data.computed_order import AT_ONCE, DRAWN_UP_TO, ComputedOrder
from tr_core.data.sampler import EpochSampler, permutation

BILLION = 10**9


def whole(number, seed=0, epoch=0):
    return ComputedOrder(number, seed, epoch).at(np.arange(number))


def sampler_of(number, size, **options):
    return EpochSampler(number, size, shuffle=True, computed=True, seed=3, **options)


SIZES = [*range(9), 100, DRAWN_UP_TO, DRAWN_UP_TO + 1, 4225, 4226, 4999, 2**13, 2**13 + 1, 65_537, 99_991, 300_001]


@pytest.mark.parametrize("number", SIZES)
def test_each_sample_has_one_place(number):
    for seed in (0, 7, 2**40):
        assert np.array_equal(np.sort(whole(number, seed)), np.arange(number))


@pytest.mark.parametrize("number", [10**8, BILLION, 2**40 + 7, 10**12, 2**62])
def test_places_far_apart_have_different_samples_of_the_data(number):
    places = np.unique(np.linspace(0, number - 1, 50_000).astype(np.int64).clip(0, number - 1))
    samples = ComputedOrder(number, 1, 2).at(places)
    assert len(np.unique(samples)) == len(places)
    assert samples.min() >= 0
    assert samples.max() < number


def test_an_order_never_changes():
    """A checkpoint of an earlier release resumes inside an epoch."""
    assert whole(10).tolist() == [2, 8, 6, 4, 1, 9, 0, 5, 3, 7]
    assert ComputedOrder(BILLION, 42, 3)[5:10] == [178166692, 855548840, 82281055, 945757023, 960406530]
    assert ComputedOrder(10**12, 42, 3)[10**12 - 3 : 10**12] == [427604654732, 136746560175, 576065900941]


@pytest.mark.parametrize("number", [1, 7, 100, DRAWN_UP_TO + 1, 10_000])
def test_slices_are_those_of_the_whole_order(number):
    order, expected = ComputedOrder(number, 1, 1, 4, 12), whole(number, 1, 1).tolist()
    assert list(order) == expected
    for start in (*range(0, number, 12), 0, number // 2, 5):
        stop = min(start + 4, number)
        assert order[start:stop] == expected[start:stop]
    assert order[number:] == []


# Statistics of a permutation, each with its mean and variance over all permutations of n numbers. The mean over many
# keys must be within 4.5 standard errors; with 4 rounds instead of 8, `columns` is 20 of them away, `neighbours` 12.
def correlation(first, second):
    return float(np.corrcoef(first, second)[0, 1]) * math.sqrt(len(first))


STATISTICS = {
    "serial": (lambda p: correlation(p[1:], p[:-1]), 0.0, 1.0),
    "places": (lambda p: correlation(p, np.arange(len(p))), 0.0, 1.0),
    "columns": (lambda p: correlation(p[columns(p) :], p[: -columns(p)]), 0.0, 1.0),
    "neighbours": (lambda p: (abs(np.diff(p)) == 1).sum(), 2.0, 2.0),
    "fixed points": (lambda p: (p == np.arange(len(p))).sum(), 1.0, 1.0),
    "ascents": (lambda p: ((np.diff(p) > 0).sum() - (len(p) - 1) / 2) / math.sqrt((len(p) + 1) / 12), 0.0, 1.0),
    "parity": (lambda p: 2 * ((len(p) - cycles(p)) % 2) - 1, 0.0, 1.0),
}


def columns(order):
    return -(-len(order) // ((math.isqrt(len(order)) // 2 + 1) * 2))


def cycles(order):
    left, found = order.tolist(), 0
    for start in range(len(left)):
        place, found = start, found + (left[start] >= 0)
        while left[place] >= 0:
            left[place], place = -1, left[place]
    return found


@pytest.mark.parametrize("number", [5, 100, 4225, 4999])
def test_orders_are_as_mixed_as_random_permutations(number):
    """4225 is 65 * 65: with two odd sides, every order would be an even permutation."""
    keys = 400
    orders = [whole(number, seed, seed % 3) for seed in range(keys)]
    for name, (statistic, mean, variance) in STATISTICS.items():
        if number == 5 and name not in ("fixed points", "parity"):
            continue  # the other means are those of many numbers
        values = np.array([statistic(order) for order in orders], dtype=float)
        allowed = 2 / math.sqrt(number) * (number < 1000)  # correlations are not 0 on average, but -1 / sqrt(n)
        assert abs(values.mean() - mean) < 4.5 * math.sqrt(variance / keys) + allowed, (name, values.mean())


def test_every_sample_is_as_likely_at_every_place():
    """Chi-square of places against samples, in 20 * 20 cells of equal size: mean 361, standard deviation 27."""
    number, cells = 6000, np.zeros((20, 20))
    for seed in range(100):
        np.add.at(cells, (np.arange(number) * 20 // number, whole(number, seed) * 20 // number), 1)
    expected = 100 * number / 400
    # Rows and columns of the cells are fixed sums; the variance of a cell is that of a hypergeometric number.
    chi_square = ((cells - expected) ** 2).sum() / expected
    assert abs(chi_square - 361) < 5 * math.sqrt(2 * 361)


def test_all_permutations_of_a_few_samples_are_as_likely():
    found = Counter(tuple(whole(4, seed).tolist()) for seed in range(4800))
    assert len(found) == math.factorial(4)
    assert sum((count - 200) ** 2 / 200 for count in found.values()) < 23 + 5 * math.sqrt(2 * 23)


def test_epochs_and_neighbouring_seeds_have_unrelated_orders():
    number = 20_000
    orders = [whole(number, seed, epoch) for seed in (0, 1) for epoch in (0, 1)]
    for first in range(4):
        for second in range(first):
            assert abs(correlation(orders[first], orders[second])) < 5
            assert (orders[first] == orders[second]).sum() < 12  # one on average


def test_the_order_is_another_one_than_torchs_and_has_its_own_name():
    computed, usual = sampler_of(100, 4), EpochSampler(100, 4, shuffle=True, seed=3)
    assert (computed.strategy, usual.strategy) == ("random_computed", "random")
    assert [list(batch) for batch in computed] != [list(batch) for batch in usual]


@pytest.mark.parametrize("position", [0, BILLION // 2 + 4, BILLION - 8 * 1024 * 20])
@pytest.mark.parametrize("shuffled", [True, False], ids=["computed", "sequential"])
def test_batches_at_any_position_of_a_billion_samples_take_no_memory(shuffled, position):
    sampler = EpochSampler(BILLION, 8, shuffle=shuffled, computed=shuffled, seed=1, rank=1023, world_size=1024)
    sampler.seek(0, position)
    tracemalloc.start()
    batches = iter(sampler)
    for _ in range(20):
        assert len(next(batches)) == 8
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**20


def test_a_rank_computes_the_places_of_its_own_batches_alone(monkeypatch):
    computed, at = [], ComputedOrder.at
    monkeypatch.setattr(ComputedOrder, "at", lambda self, places: computed.append(places.size) or at(self, places))
    sampler = sampler_of(100_000, 4, rank=1, world_size=5)
    sampler.seek(0, 20_000)
    assert len(list(sampler)) == 80_000 // 20
    assert sum(computed) == 16_000
    assert len(computed) == -(-16_000 // AT_ONCE)


@pytest.mark.parametrize("number", [0, 1, 10, 100_003])
def test_the_usual_order_takes_four_bytes_a_sample_and_equals_torchs(number):
    expected = torch.randperm(number, generator=torch.Generator().manual_seed(4))
    found = permutation(number, 1, 3)
    assert found.element_size() == 4
    assert found.tolist() == expected.tolist()
    sampler = EpochSampler(number, 4, shuffle=True, seed=1)
    sampler.seek(3)
    assert [index for batch in sampler for index in batch] == expected.tolist()
    assert len(sampler.order()) * sampler.order().itemsize == 4 * number


def test_samples_beyond_four_bytes_have_eight(monkeypatch):
    asked = []
    monkeypatch.setattr(
        sampler_module.torch, "randperm", lambda n, generator, dtype: asked.append((n, dtype)) or torch.zeros(0)
    )
    permutation(2**31 - 1, 0, 0)
    permutation(2**31, 0, 0)
    assert asked == [(2**31 - 1, torch.int32), (2**31, torch.int64)]


# In a run

COMPUTED = {"train_sampling_strategy": "random_computed"}


class Rows:
    """As many rows as wanted, made when asked for, with noise; notes which were asked for."""

    def __init__(self, number):
        self.number, self.asked = number, []

    def __len__(self):
        return self.number

    def __getitem__(self, index):
        self.asked.append(index)
        return {"x": torch.full((8,), index / self.number) + 0.01 * torch.randn(8), "labels": torch.tensor(index % 2)}


@pytest.mark.parametrize("number", [30, 5000, 10**12])
def test_a_run_resumes_bit_equal_with_the_next_samples(make_trainer, number):
    kept, size = MemoryCheckpointer(), max(number // 8, 4) if number < 10**6 else 4

    def run(*callbacks, **changes):
        torch.manual_seed(0)
        options = {"max_steps": 12, "per_device_train_batch_size": size, "learning_rate": 0.01, **COMPUTED, **changes}
        return make_trainer(
            model=Classifier(dropout=0.2), train_dataset=Rows(number), callbacks=list(callbacks), **options
        )

    alone, begun = run(), run(StopAt(7), checkpointer=kept, save_strategy="steps", save_steps=7)
    alone.train()
    with pytest.raises(Stop):
        begun.train()
    resumed = run(checkpointer=kept)
    resumed.train(resume_from_checkpoint=True)
    assert begun.train_dataset.asked + resumed.train_dataset.asked == alone.train_dataset.asked
    assert all(map(torch.equal, resumed.model.state_dict().values(), alone.model.state_dict().values()))
    first = alone.train_dataset.asked[: min(number, 12 * size)]
    assert first == ComputedOrder(number, alone.args.seed, 0).at(np.arange(len(first))).tolist()


@pytest.mark.parametrize("strategy", ["random_computed", "group_by_length"])
def test_iterable_data_has_an_order_of_its_own(make_trainer, strategy):
    trainer = make_trainer(train_dataset=Stream(Rows(8)), max_steps=2, train_sampling_strategy=strategy)
    message = f"'{strategy}' puts samples into an order, but Stream is iterable data, which has its own; leave"
    with pytest.raises(ValueError, match=message):
        trainer.train()


def test_a_sampler_of_a_subclass_decides_and_the_usual_one_is_computed(make_trainer):
    class Own(Trainer):
        def _get_train_sampler(self, train_dataset=None):
            return torch.utils.data.SequentialSampler(self.train_dataset)

    rows = Rows(12)
    make_trainer(train_dataset=rows, trainer_class=Own, num_train_epochs=1, **COMPUTED).train()
    assert rows.asked == list(range(12))
    sampler = make_trainer(train_dataset=Rows(10**12), **COMPUTED)._get_train_sampler()
    first = [index for index, _ in zip(sampler, range(5), strict=False)]
    assert len(set(first)) == 5
    assert [index for index, _ in zip(sampler, range(5), strict=False)] != first


def test_a_loader_of_ones_own_gets_torchs_order(make_trainer):
    data = list(range(1000))
    sampler = make_trainer(train_dataset=data)._get_train_sampler()
    torch.manual_seed(5)
    found = list(sampler)
    torch.manual_seed(5)
    assert found == list(torch.utils.data.RandomSampler(data))


@pytest.mark.parametrize("strategy", ["random_computed", "sequential"])
def test_a_run_goes_on_exactly_at_sample_a_billion_of_a_pass(make_trainer, monkeypatch, strategy):
    """What a checkpoint there would hold is put into one of step 2: no test trains so long."""
    kept, steps, number = MemoryCheckpointer(), BILLION // 4, 3 * BILLION + 1
    monkeypatch.setattr(Classifier, "main_input_name", "x", raising=False)
    options = {
        "train_sampling_strategy": strategy,
        "per_device_train_batch_size": 4,
        "save_strategy": "steps",
        "save_steps": 1,
        "include_num_input_tokens_seen": "all",
        "logging_steps": 1,
        "checkpointer": kept,
    }
    with pytest.raises(Stop):
        make_trainer(train_dataset=Rows(number), max_steps=steps + 3, callbacks=[StopAt(2)], **options).train()
    saved, seen = copy.deepcopy(kept.saved[2]), 2**53 + 1
    saved["run"]["samples"], saved["run"]["last_logged_step"] = BILLION, steps
    saved["trainer_state"] |= {"global_step": steps, "epoch": BILLION / number, "num_input_tokens_seen": seen}
    kept.saved = {steps: saved}
    trainer = make_trainer(train_dataset=Rows(number), max_steps=steps + 3, **options)
    trainer.train(resume_from_checkpoint=True)
    first = np.arange(BILLION, BILLION + 12)
    expected = first if strategy == "sequential" else ComputedOrder(number, trainer.args.seed, 0).at(first)
    assert trainer.train_dataset.asked == expected.tolist()
    assert trainer.state.global_step == steps + 3
    assert kept.saved[steps + 3]["run"]["samples"] == BILLION + 12
    assert trainer.state.num_input_tokens_seen == seen + 12 * 8
    epochs = [entry["epoch"] for entry in trainer.state.log_history if entry["step"] > steps and "loss" in entry]
    assert epochs == [(steps + more) / -(-number // 4) for more in (1, 2, 3)]
    assert len(set(epochs)) == 3
