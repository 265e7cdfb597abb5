"""Optimizers on parameters that FSDP2 divides over ranks end as on whole ones, and gather no gradient."""

import functools

import pytest
import shard_models
import shard_workers
import torch
from shard_workers import FUSED, IN_BFLOAT16, IN_CODES, ON_FOUR, ORDINARY, PROJECTED, REFUSED, RESUMED


@pytest.fixture(scope="module")
def on_two():
    return shard_models.run(2, shard_workers.train_all)


@pytest.fixture(scope="module")
def on_four():
    return shard_models.run(4, shard_workers.train_on_four)


@functools.cache
def alone(name):
    return shard_workers.function_of(name)(name, None)


def assert_ends_as_whole(found, expected):
    # Ten times what is found on one processor or another; a rate that is 1% greater moves weights by 5e-4.
    torch.testing.assert_close(found["weights"], expected["weights"], rtol=0, atol=5e-5)
    # The last columns of a basis are of directions that are almost alike; weights hardly depend on which they are.
    torch.testing.assert_close(found["states"], expected["states"], rtol=1e-2, atol=1e-2)
    assert found["norms"] == pytest.approx(expected["norms"], rel=1e-5, nan_ok=True)
    assert found["equal"], "what all ranks have differs between them"


@pytest.mark.parametrize("name", [*FUSED, *PROJECTED, *ORDINARY])
def test_two_ranks_end_as_one_process_with_whole_parameters(on_two, name):
    for ranks in on_two:
        assert_ends_as_whole(ranks[name], alone(name))


def test_bases_in_bfloat16_end_alike_but_for_their_rounding(on_two):
    # What differs by float32's rounding may be rounded to another bfloat16, 1/256 of a number away.
    for name in IN_BFLOAT16:
        expected = alone(name)
        for ranks in on_two:
            torch.testing.assert_close(ranks[name]["weights"], expected["weights"], rtol=0, atol=5e-3)
            assert ranks[name]["equal"]
            bases = [v for values in ranks[name]["states"].values() for k, v in values.items() if "basis" in k]
            assert {basis.dtype for basis in bases} == {torch.bfloat16}


@pytest.mark.parametrize("name", IN_CODES)
def test_bases_in_codes_end_alike_but_for_their_rounding(on_two, name):
    # What differs by float32's rounding may have another code, 1/127 or 1/7 of the largest number of a block away.
    expected = alone(name)
    for ranks in on_two:
        torch.testing.assert_close(ranks[name]["weights"], expected["weights"], rtol=0, atol=2e-3)
        assert ranks[name]["equal"]
        states, layouts = ranks[name]["states"], ranks[name]["placements"]
        assert states[0]["basis_right"].dtype == expected["states"][0]["basis_right"].dtype != torch.float32
        for key in ("basis_right", "basis_right_scales"):
            assert states[0][key].shape == expected["states"][0][key].shape
            assert layouts[0][key] == "(Replicate(),)"


def test_what_galore_torch_computes_is_the_same_on_all_ranks(on_two):
    assert all(ranks["compat"]["equal"] for ranks in on_two)
    for name, weights in on_two[0]["compat"]["weights"].items():
        assert torch.equal(weights, on_two[1]["compat"]["weights"][name])
        torch.testing.assert_close(weights, alone("compat")["weights"][name], rtol=0, atol=1e-5)


def test_weights_in_bfloat16_are_rounded_stochastically_and_each_row_by_itself(on_two):
    found = on_two[0]["rounded"]
    assert found["to nearest"] == 0, "updates this small are lost"
    assert found["stochastically"] == pytest.approx(1, abs=0.2)
    assert found["replicas are equal"]
    assert not found["rows of ranks are alike"]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["", " in replicas"])
@pytest.mark.parametrize("name", ON_FOUR)
def test_four_ranks_end_as_one_process_with_whole_parameters(on_four, name, how):
    for ranks in on_four:
        assert_ends_as_whole(ranks[name + how], alone(name))


def test_norms_are_estimated_where_no_whole_gradient_is_there(on_two):
    estimated = {name for name in PROJECTED if on_two[0][name]["estimated"]}
    # Of what is not in shards, each rank projects its own gradient, whose mean is never there.
    assert estimated == {
        "full accumulated immediate",
        "left accumulated",
        "right accumulated, from the first",
        "left accumulated, clipped",
        "right accumulated, clipped",
        "full accumulated, clipped",
        "svd left accumulated, clipped",
        "partly",
    }


@pytest.mark.parametrize("name", RESUMED)
def test_a_loaded_state_goes_on_with_the_same_bits(on_two, name):
    for ranks in on_two:
        assert ranks[f"resumed {name}"] == [True, True, True]


def test_a_state_has_the_layout_of_what_it_is_made_of(on_two):
    rows, everywhere = "(Shard(dim=0),)", "(Replicate(),)"
    moments = {"exp_avg": rows, "exp_avg_sq": rows}
    left, right, full = (on_two[0][name]["placements"][0] for name in ("left", "right", "full"))
    assert left == {"step": "None", "basis_left": rows} | dict.fromkeys(moments, everywhere)
    assert right == {"step": "None", "basis_right": everywhere, **moments}
    assert full == {"step": "None", "basis_left": rows, "basis_right": everywhere} | dict.fromkeys(moments, everywhere)
    stack = {"step": "None", "basis_left": rows, "basis_right": rows, **moments}
    assert on_two[0]["full"]["placements"][1] == stack, "whole matrices of a stack are divided"
    bias = on_two[0]["full"]["placements"][4]
    assert bias == {"step": "None", **moments}
    matrix = {"step": "None", "exp_avg_sq_row": rows, "exp_avg_sq_col": everywhere}
    assert matrix in on_two[0]["adalomo"]["placements"].values()


def test_no_piece_of_a_gradient_keeps_those_of_other_parameters(on_two):
    assert on_two[0]["kept memory"] == [True] * 4


def test_what_is_exchanged_is_small_and_no_gradient(on_two):
    # Weights 9 x 6, 5 x 5 and 1 x 5, a stack of three 9 x 7, 5 x 1 x 3 x 3, and four biases; rank 3.
    sizes = on_two[0]["exchanges"]
    assert sizes["right"] == [], "each rank projects its own rows"
    for name in ("left", "left in step"):
        assert sizes[name] == [3 * 6 + 3 * 5 + 1 * 5], "projections are added up once, together"
    # Norms of two sums, and for each matrix (n, r) once.
    assert sorted(sizes["right, each step"]) == [1, 1, 1, 5 * 1, 5 * 3, 6 * 3]
    # As much, and Gram matrices: two to make columns orthonormal, one to carry moments over.
    left = [5 * 1, 1, 1, 1, 1, 5 * 3, 1, 9, 9, 9, 6 * 3, 1, 9, 9, 9, 3 * 6 + 3 * 5 + 1 * 5]
    assert sorted(sizes["left, each step"]) == sorted(left)
    # Sums of columns and of row factors, and squares; flags of what is not finite; at last the norm.
    flags = sizes["adalomo"]
    assert (sum(flags), len(flags)) == ((6 + 5 + 5) + 3 + 9 + 9 + 9 + 1, 7)
    assert (sum(sizes["adalomo, no flags"]), len(sizes["adalomo, no flags"])) == (16 + 3 + 9 + 9 + 2, 6)


WORDS = {
    "partly immediate": "mode='immediate' with reduction='projected' is for one process, and there are 2",
    "int8 basis": "(9, 6) are divided over ranks, and with them its basis, of whose codes with basis_dtype='int8' one",
    "int4 basis of a stack": "GaLoreAdamW: the rows of a parameter of shape (3, 9, 7) are divided over ranks",
    "another rule": "(9, 6) is a DTensor, of which each rank holds a part, and what its rule needs of whole ones is",
    "by columns": "is a DTensor with (Shard(dim=1),) over (2,) ranks; what is built is rows divided over ranks",
    "on meta": "is on meta, and its gradients are exchanged on cpu",
    "over two meshes": "a parameter of shape (5, 5) is divided over other ranks than one of shape (9, 6)",
    "over two meshes, adalomo": "AdaLomo: a parameter of shape (5, 5) is divided over other ranks",
    "whole ones alone": "OnlyWhole: a parameter of shape (9, 6) is a DTensor, of which each rank holds a part",
    **{
        f"not bound, {mode}": "2 ranks train together, and GaLoreAdamW would apply the gradients of each rank alone; "
        "call optimizer.bind"
        for mode in ("deferred", "immediate")
    },
    "another gradient": "is laid out over the ranks in another way than the parameter",
}


def test_svd_gathers_one_matrix_at_a_time_where_it_finds_a_basis(on_two):
    for ranks in on_two:
        # All matrices in the first step; then they take turns.
        matrices, counts, at_once = ranks["gathered by svd"]
        assert matrices > 1
        assert counts == [matrices, 1]
        assert at_once == 1


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_built_over_parts_is_refused(on_two, name):
    assert WORDS[name] in on_two[0]["refusals"][name]
