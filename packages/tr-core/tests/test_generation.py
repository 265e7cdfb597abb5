"""A rank that has generated its rows repeats one forward while others continue, as far as its cache allows."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tr_core.evaluation.generation import synced_generation

RANKS = SimpleNamespace(forward_is_collective=True, world_size=2)
ONE = SimpleNamespace(forward_is_collective=True, world_size=1)
APART = SimpleNamespace(forward_is_collective=False, world_size=2)


class DynamicLayer:
    pass


class SlidingLayer:
    pass


class Cache:
    def __init__(self, *layers):
        self.layers, self.length = layers, 0

    def crop(self, number):
        self.length += number


class Synced(nn.Module):
    """Makes `own` forwards that count and `more` after them, as `generate` of transformers does for other ranks."""

    def __init__(self, own=3, more=4, layer=DynamicLayer, asks=True):
        super().__init__()
        self.own, self.more, self.asks, self.seen = own, more, asks, []
        self.cache = None if layer is None else Cache(layer())

    def forward(self, input_ids, past_key_values=None, position=0):
        if past_key_values is not None:
            past_key_values.length += input_ids.shape[1]
        self.seen.append((position, None if past_key_values is None else past_key_values.length))

    def generate(self, input_ids, synced_gpus=False, stopping_criteria=()):
        for number in range(self.own + (self.more if synced_gpus else 0)):
            self(input_ids=input_ids, past_key_values=self.cache, position=number)
            if number < self.own and self.asks:
                assert not any(criterion(input_ids, None).any() for criterion in stopping_criteria)
        return synced_gpus


class Around(nn.Module):
    """As an adapter: takes all options, and shows what the module inside has."""

    def __init__(self, inner):
        super().__init__()
        self.between = nn.Module()
        self.between.inner = inner
        object.__setattr__(self.between, "generate", inner.generate)

    def generate(self, **options):
        return self.between.inner.generate(**options)


def seen(model, strategy=RANKS, **options):
    inner = model.between.inner if isinstance(model, Around) else model
    with synced_generation(options, model, strategy) as all_options:
        model.generate(input_ids=torch.ones(2, 1).long(), **all_options)
    assert not inner._forward_pre_hooks
    return inner.seen


def test_the_first_forward_too_many_is_repeated_and_the_cache_keeps_its_length():
    expected = [(0, 1), (1, 2), (2, 3), *[(3, 4)] * 4]
    assert [length for _, length in seen(Synced())] == [length for _, length in expected]
    assert seen(Around(Synced()))[3:] == expected[3:]


@pytest.mark.parametrize(
    ("options", "lengths"),
    [
        ({"layer": SlidingLayer}, [1, 2, 3, 4, 5, 6, 7]),
        ({"asks": False}, [1, 2, 3, 4, 5, 6, 7]),
        ({"layer": None}, [None] * 7),
    ],
    ids=["a cache that forgets", "a method that asks no criteria", "no cache"],
)
def test_a_forward_that_cannot_be_undone_is_not_repeated(options, lengths):
    assert [length for _, length in seen(Synced(**options))] == lengths


def test_without_a_cache_the_same_forward_is_made():
    assert [position for position, _ in seen(Synced(layer=None))] == [0, 1, 2, 3, 3, 3, 3]


@pytest.mark.parametrize(("strategy", "forwards"), [(RANKS, 7), (ONE, 3), (APART, 3)])
def test_only_ranks_that_need_each_other_continue(strategy, forwards):
    assert len(seen(Synced(), strategy)) == forwards


def test_criteria_that_are_given_are_asked_too():
    asked = []
    seen(Synced(), stopping_criteria=[lambda ids, scores: asked.append(1) or torch.zeros(2, dtype=torch.bool)])
    assert len(asked) == 3


def test_a_model_that_knows_no_option_gets_none():
    class Plain(nn.Module):
        def generate(self, input_ids):
            return input_ids

    with synced_generation({}, Plain(), RANKS) as options:
        assert options == {}
