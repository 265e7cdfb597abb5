"""Seeds of every library, and what deterministic kernels ask for."""

import os
import random

import numpy as np
import pytest
import torch

from tr_core.random_state import derive_seed, enable_full_determinism, separate_randomness, set_seed

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
    assert all(a != b for a, b in zip(found[5], found[7], strict=True))
    assert found[5][1] == found[5 + 2**32][1]  # NumPy's seeds have 32 bits
    assert found[5][0] != found[5 + 2**32][0]
