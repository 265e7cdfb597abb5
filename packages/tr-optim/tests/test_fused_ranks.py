"""Ranks that update during the backward pass stay equal bit for bit, and equal to one process with all their data."""

import functools

import fused_workers
import pytest
import torch
import torch.multiprocessing
from fused_models import assert_same_bits, build
from fused_workers import SCENARIOS, Branches


@functools.cache
def alone(name, world_size):
    return fused_workers.run_scenario(name, world_size)


@pytest.fixture(scope="module", params=[2, pytest.param(3, marks=pytest.mark.slow)])
def results(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(f"ranks{request.param}")
    torch.multiprocessing.start_processes(
        fused_workers.train_as_rank, (request.param, str(folder)), nprocs=request.param, start_method="forkserver"
    )
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(request.param)]


@pytest.mark.parametrize("name", SCENARIOS)
def test_ranks_are_equal_bit_for_bit(results, name):
    first, *others = [result[name] for result in results]
    for other in others:
        assert_same_bits(first["weights"], other["weights"])
        assert first["norms"] == other["norms"]
        for mine, theirs in zip(first["states"], other["states"], strict=True):
            assert_same_bits(mine, theirs)


@pytest.mark.parametrize("name", SCENARIOS)
def test_ranks_end_as_one_process_with_all_their_data(results, name):
    found, expected = results[0][name], alone(name, len(results))
    torch.testing.assert_close(found["weights"], expected["weights"], rtol=0, atol=1e-6)
    assert found["norms"] == pytest.approx(expected["norms"], rel=1e-5)


def test_half_precision_ranks_are_equal_bit_for_bit(results):
    for result in results[1:]:
        assert_same_bits(results[0]["half"], result["half"])


def test_what_is_not_finite_on_one_rank_is_left_out_on_all(results):
    for result in results:
        good, after_loss, after_gradient = result["one bad"]
        assert not torch.equal(good["head.weight"], dict(build().named_parameters())["head.weight"])
        assert_same_bits(good, after_loss)
        assert_same_bits(good, after_gradient)
        assert_same_bits(good, results[0]["one bad"][0])


def test_parameters_that_no_rank_uses_stay_as_they_are(results):
    idle = build(Branches).idle
    for name in ("lomo branches", "adalomo branches", "lomo branches clipped"):
        assert torch.equal(results[0][name]["weights"]["idle.weight"], idle.weight)


def test_each_large_gradient_travels_alone_and_small_ones_together(results):
    for result in results:
        for step, (alone_calls, sums, waiting) in enumerate(result["exchanges"]):
            # Of 36 numbers: five weights, of which two are not used. Biases travel together.
            assert (alone_calls, sums) == (5, 1)
            assert waiting <= (3 if step == 0 else 0), "once the order is known, no gradient waits for another"


def test_values_may_travel_through_what_was_bound(results):
    for result in results:
        assert_same_bits(result["through sum"]["weights"], results[0]["through sum"]["weights"])
    torch.testing.assert_close(
        results[0]["through sum"]["weights"], results[0]["lomo clipped"]["weights"], rtol=0, atol=1e-7
    )


def test_ranks_that_are_not_bound_are_refused(results):
    size = len(results)
    assert results[0]["unbound"].startswith(
        f"{size} ranks train together, and Lomo would apply the gradients of each rank alone"
    )
    assert "call optimizer.bind(strategy) first" in results[0]["unbound"]
