"""Moments in 8 bits of parameters that FSDP2 divides over ranks: rows have their own blocks, wherever they are."""

import pytest
import shard_8bit_workers
import shard_models
import torch
from shard_8bit_workers import KINDS, STEPS, train


@pytest.fixture(scope="module", params=[2, pytest.param(3, marks=pytest.mark.slow)])
def ranks(request):
    return shard_models.run(request.param, shard_8bit_workers.train_all)


def trained(name, first=0, last=STEPS, start=None):
    model = shard_models.build()
    optimizer = KINDS[name](model)
    if start is not None:
        model.load_state_dict(start["weights"])
        optimizer.load_state_dict({**optimizer.state_dict(), "state": start["states"]})
    train(model, optimizer, first, last)
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def flat(weights):
    return torch.cat([value.flatten() for value in weights.values()])


@pytest.mark.parametrize("name", KINDS)
def test_ranks_end_as_one_process_with_whole_parameters_but_for_single_codes(ranks, name):
    expected, before = trained(name), trained(name, last=0)
    for found in ranks:
        assert torch.equal(flat(found[name]["weights"]), flat(ranks[0][name]["weights"]))
        assert (flat(found[name]["weights"]) - expected).norm() < 0.01 * (expected - before).norm()
        assert not found[name]["differ"]


@pytest.mark.parametrize("name", KINDS)
def test_a_loaded_state_goes_on_with_the_same_bits_whole_or_in_the_layout_of_the_parameters(ranks, name):
    for found in ranks:
        assert found[name]["same layout"]
        assert found[name]["whole"]


@pytest.mark.parametrize("name", KINDS)
def test_a_state_of_several_ranks_goes_on_in_one_process(ranks, name):
    resumed = trained(name, first=4, start=ranks[0][name]["middle"])
    expected, before = flat(ranks[0][name]["weights"]), trained(name, last=0)
    assert (resumed - expected).norm() < 0.01 * (expected - before).norm()


def test_codes_and_scales_have_the_layout_of_the_rows_that_they_belong_to(ranks):
    rows, everywhere = "(Shard(dim=0),)", "(Replicate(),)"
    names = ("exp_avg", "exp_avg_scale", "exp_avg_sq", "exp_avg_sq_scale")
    found = ranks[0]
    assert found["adamw"]["layout"][0] == {"step": "None"} | dict.fromkeys(names, rows)
    assert found["left"]["layout"][0] == {"step": "None", "basis_left": rows} | dict.fromkeys(names, everywhere)
    assert found["right"]["layout"][0] == {"step": "None", "basis_right": everywhere} | dict.fromkeys(names, rows)
    assert found["adamw"]["middle"]["states"][0]["exp_avg"].dtype == torch.int8


def test_what_is_of_one_dimension_and_in_shards_has_float32_moments(ranks):
    model = shard_models.build()
    states = ranks[0]["adamw"]["middle"]["states"]
    for number, parameter in enumerate(model.parameters()):
        assert states[number]["exp_avg"].shape == parameter.shape
        assert states[number]["exp_avg"].dtype == (torch.float32 if parameter.dim() == 1 else torch.int8)


def test_the_least_size_is_that_of_the_whole_parameter(ranks):
    model = shard_models.build()
    for found in ranks:
        states = found["adamw of some"]["middle"]["states"]
        for number, parameter in enumerate(model.parameters()):
            is_large = parameter.dim() > 1 and parameter.numel() >= 40
            assert (states[number]["exp_avg"].dtype == torch.int8) == is_large
