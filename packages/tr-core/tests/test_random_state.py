"""Seeds of every library, states of their generators, and deterministic kernels."""

import functools
import os
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tr_core import enable_full_determinism, set_seed
from tr_core.random_state import (
    RandomState,
    derive_seed,
    find_generators,
    read_states,
    separate_randomness,
    write_states,
)

VARIABLES = ("CUBLAS_WORKSPACE_CONFIG", "FLASH_ATTENTION_DETERMINISTIC")


@pytest.fixture
def kernels(monkeypatch):
    """What torch is asked for, which does not reach it."""
    asked = []
    monkeypatch.setattr(torch, "use_deterministic_algorithms", asked.append)
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", False)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    monkeypatch.setattr(os, "environ", {name: value for name, value in os.environ.items() if name not in VARIABLES})
    return asked


def draws():
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def test_the_same_seed_gives_the_same_numbers_of_every_library():
    set_seed(5)
    first = draws()
    assert draws() != first
    set_seed(5)
    assert draws() == first
    set_seed(6)
    assert all(a != b for a, b in zip(draws(), first, strict=True))
    assert torch.initial_seed() == 6


def test_a_seed_beyond_what_numpy_takes_is_taken_modulo():
    set_seed(2**32 + 3)
    large = float(np.random.rand())
    set_seed(3)
    assert float(np.random.rand()) == large


def test_deterministic_kernels_are_asked_for_only_where_that_is_wanted(kernels):
    set_seed(5)
    assert kernels == []
    assert not any(name in os.environ for name in VARIABLES)
    enable_full_determinism(7)
    assert kernels == [True]
    assert (torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark) == (True, False)
    assert [os.environ[name] for name in VARIABLES] == [":16:8", "1"]
    assert torch.initial_seed() == 7


def test_what_the_environment_says_of_kernels_stays(kernels):
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    set_seed(5, deterministic=True)
    assert kernels == [True]
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"


def test_mixed_seeds_are_those_they_have_always_been_and_depend_on_every_number():
    """Checkpoints and data orders of earlier runs depend on these."""
    numbers = {
        (): 2850178704830799621,
        (0,): 4073552104164651883,
        (1,): 1990071630548588925,
        (1, 2): 995517556976726569,
        (2, 1): 4290193690171624775,
        (2**64 + 1,): 1990071630548588925,
    }
    assert {given: derive_seed(*given) for given in numbers} == numbers
    assert len({derive_seed(a, b, c) for a in range(8) for b in range(8) for c in range(8)}) == 512
    assert len({derive_seed(a, b) for a in range(50) for b in range(50)}) == 2500
    assert all(0 <= derive_seed(n) < 2**62 for n in range(100))


def test_a_block_with_a_seed_of_its_own_draws_by_it_and_leaves_no_trace():
    found = {}
    set_seed(1)
    outside = draws()
    for seed in (5, 7, 5 + 2**32):
        set_seed(1)
        with separate_randomness(seed):
            found[seed] = draws()
        assert draws() == outside
    with separate_randomness(5):
        assert draws() == found[5]
    assert all(a != b for a, b in zip(found[5], found[7], strict=True))
    assert found[5][1] == found[5 + 2**32][1]  # NumPy's seeds have 32 bits
    assert found[5][0] != found[5 + 2**32][0]


def test_seeding_reaches_a_device_that_torch_does_not_seed_itself(monkeypatch):
    seeds = []
    monkeypatch.setattr(torch, "get_device_module", lambda device: SimpleNamespace(manual_seed=seeds.append))
    set_seed(11, device=torch.device("xla"))
    set_seed(12, device=torch.device("cpu"))
    assert seeds == [11]


def test_the_state_of_all_generators_can_be_taken_and_put_back():
    state = RandomState(torch.device("cpu"))
    saved = state.state_dict()
    expected = draws()
    state.load_state_dict(saved)
    assert draws() == expected
    state.reapply()
    assert draws() == expected
    state.reapply()
    assert draws() != expected


# Generators


class Holder:
    def __init__(self, **attributes):
        vars(self).update(attributes)


def holders():
    made = [torch.Generator(), np.random.default_rng(0), np.random.RandomState(0), random.Random(0)]

    def draw(rows):
        return made[1].random()

    return made, {
        "sampler.generator": Holder(sampler=Holder(generator=made[0])),
        "dataset.transforms.1.rng": Holder(dataset=Holder(transforms=[str, Holder(rng=made[2])])),
        "collate_fn.made.0": Holder(collate_fn=draw),
        "collate_fn.rng": Holder(collate_fn=functools.partial(max, rng=made[3])),
    }


WAYS = ["sampler.generator", "dataset.transforms.1.rng", "collate_fn.made.0", "collate_fn.rng"]


@pytest.mark.parametrize("path", WAYS)
def test_a_generator_is_found_by_the_way_to_it(path):
    assert path in find_generators(holders()[1][path])


def test_global_generators_modules_and_running_workers_are_no_part_of_a_loader():
    held = Holder(a=torch.default_generator, b=np.random.mtrand._rand, c=np.random, _iterator=Holder(d=random.Random()))
    assert find_generators(held) == {}


def test_every_kind_of_generator_goes_back_to_a_state():
    made, _ = holders()
    generators = dict(enumerate(made))

    def draw():
        return [torch.rand((), generator=made[0]).item(), *(generator.random() for generator in made[1:])]

    states = read_states(generators)
    first = draw()
    assert draw() != first
    write_states(generators, states)
    assert draw() == first
