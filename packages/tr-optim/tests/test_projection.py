import itertools
from types import SimpleNamespace

import pytest
import torch

from tr_optim.projection.basis import Basis, find_basis, orthonormalise, projected_shape, seeded_normal, sides
from tr_optim.projection.refresh import Rotation, is_due


def gradient(m, n, *, decay=0.5, seed=0, batch=()):
    """Make a matrix of singular values `i ** -decay`."""
    generator = torch.Generator().manual_seed(seed)
    k = min(m, n)
    left = torch.linalg.qr(torch.randn(*batch, m, k, generator=generator)).Q
    right = torch.linalg.qr(torch.randn(*batch, n, k, generator=generator)).Q
    return (left * torch.arange(1, k + 1).float().pow(-decay)) @ right.mT


def drifting(m, n, rho=0.3):
    """Make a matrix, and one whose two factors have turned by a share `rho`."""
    generator = torch.Generator().manual_seed(0)
    k = min(m, n)
    scales = torch.arange(1, k + 1).float().pow(-0.5)
    left, right = torch.randn(m, k, generator=generator) / m**0.5, torch.randn(k, n, generator=generator) / n**0.5
    noise = torch.randn(m, k, generator=generator) / m**0.5, torch.randn(k, n, generator=generator) / n**0.5
    kept = (1 - rho**2) ** 0.5
    return (left * scales) @ right, ((kept * left + rho * noise[0]) * scales) @ (kept * right + rho * noise[1])


def energy(matrix, columns):
    return (columns.mT @ matrix).square().sum() / torch.linalg.svdvals(matrix)[..., : columns.shape[-1]].square().sum()


def is_orthonormal(columns, tolerance=2e-6):
    return (columns.mT @ columns - torch.eye(columns.shape[-1])).abs().max() < tolerance


@pytest.mark.parametrize(
    ("proj_type", "tall", "wide", "square"),
    [
        ("std", "right", "left", "right"),
        ("reverse_std", "left", "right", "left"),
        ("right", "right", "right", "right"),
        ("left", "left", "left", "left"),
        ("full", "both", "both", "both"),
    ],
)
def test_the_side_depends_on_type_and_shape(proj_type, tall, wide, square):
    named = {"left": (True, False), "right": (False, True), "both": (True, True)}
    for shape, side in (((9, 5), tall), ((5, 9), wide), ((5, 5), square), ((3, 5, 9), wide)):
        assert sides(shape, proj_type) == named[side]


@pytest.mark.parametrize("proj_type", ["std", "reverse_std", "left", "right", "full"])
@pytest.mark.parametrize("shape", [(12, 30), (30, 12), (2, 12, 30)])
def test_a_projection_has_the_shape_that_is_foretold_and_is_undone_within_the_basis(proj_type, shape):
    matrix = gradient(*shape[-2:], batch=shape[:-2])
    for rank in (4, 50):
        basis = find_basis(matrix, rank, proj_type)
        down = basis.down(matrix)
        assert tuple(down.shape) == projected_shape(shape, rank, proj_type)
        torch.testing.assert_close(basis.down(basis.up(down)), down, rtol=1e-5, atol=1e-6)
    if proj_type != "reverse_std":  # a rank of all directions loses nothing of what the shorter side holds
        side = basis.left if basis.left is not None and shape[-2] < shape[-1] else basis.right
        if side is not None and side.shape[-2] == side.shape[-1] and proj_type == "std":
            torch.testing.assert_close(basis.up(down), matrix, rtol=1e-5, atol=1e-6)


def test_a_basis_from_nothing_holds_most_of_what_the_best_holds():
    matrix = gradient(96, 256)
    basis = find_basis(matrix, 24, "std")
    assert is_orthonormal(basis.left)
    assert energy(matrix, basis.left) > 0.93


@pytest.mark.parametrize(("m", "n", "side"), [(96, 256, "left"), (256, 96, "right")])
def test_one_iteration_from_the_last_basis_holds_98_percent_of_what_the_best_holds(m, n, side):
    first, second = drifting(m, n)
    best = torch.linalg.svd(first, full_matrices=False)
    old = Basis(best.U[:, :24], None) if side == "left" else Basis(None, best.Vh[:24].mT)
    basis = find_basis(second, 24, "std", old)
    columns, matrix = (basis.left, second) if side == "left" else (basis.right, second.mT)
    assert is_orthonormal(columns)
    assert energy(matrix, columns) > 0.98


@pytest.mark.parametrize("proj_type", ["left", "right"])
def test_a_basis_finds_directions_of_which_the_old_one_has_nothing(proj_type):
    old = Basis(torch.eye(12)[:, :3], None) if proj_type == "left" else Basis(None, torch.eye(12)[:, :3])
    matrix = torch.zeros(12, 12)
    matrix[4:, 4:] = gradient(8, 8)[:, :2] @ gradient(2, 8, seed=1)
    basis = find_basis(matrix, 3, proj_type, old)
    columns, seen = (basis.left, matrix) if proj_type == "left" else (basis.right, matrix.mT)
    assert energy(seen, columns) > 0.99


def test_a_basis_follows_a_gradient_without_a_jump():
    matrix = gradient(40, 70)
    old = find_basis(gradient(40, 70, seed=3), 8, "std")
    near = matrix * (1 + 1e-7 * torch.randn(40, 70, generator=torch.Generator().manual_seed(0)))
    moved = (find_basis(matrix, 8, "std", old).left - find_basis(near, 8, "std", old).left).abs().max()
    assert moved < 1e-5
    cold = (find_basis(matrix, 8, "std").left - find_basis(near, 8, "std").left).abs().max()
    assert cold < 1e-5


def test_singular_vectors_are_the_best_basis_and_have_a_sign():
    matrix = gradient(20, 30)
    basis = find_basis(matrix, 5, "std", method="svd")
    assert energy(matrix, basis.left) > 1 - 1e-6
    flipped = find_basis(-matrix, 5, "std", method="svd")
    torch.testing.assert_close(basis.left, flipped.left, rtol=0, atol=1e-6)


@pytest.mark.parametrize("method", ["subspace", "svd"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_leaves_the_basis_as_it_is(method, bad):
    old = find_basis(gradient(12, 20), 4, "full")
    matrix = gradient(12, 20, seed=1)
    matrix[3, 4] = bad
    new = find_basis(matrix, 4, "full", old, method=method)
    assert torch.equal(new.left, old.left)
    assert torch.equal(new.right, old.right)
    cold = find_basis(matrix, 4, "std", method=method)
    assert cold.left.isfinite().all()


@pytest.mark.parametrize("method", ["subspace", "svd"])
def test_one_bad_matrix_of_a_stack_spoils_no_other(method):
    stack = gradient(12, 20, batch=(3,))
    old = find_basis(gradient(12, 20, seed=1, batch=(3,)), 4, "std")
    expected = find_basis(stack, 4, "std", old, method=method)
    stack = stack.clone()
    stack[1, 0, 0] = float("nan")
    new = find_basis(stack, 4, "std", old, method=method)
    assert torch.equal(new.left[1], old.left[1])
    torch.testing.assert_close(new.left[0::2], expected.left[0::2], rtol=0, atol=0)


def test_one_bad_matrix_of_a_stack_that_ranks_share_out_spoils_no_other():
    of_stacks = SimpleNamespace(divides_matrix=False, shape=(3, 12, 20))
    stack = gradient(12, 20, batch=(3,))
    old = find_basis(gradient(12, 20, seed=1, batch=(3,)), 4, "full")
    expected = find_basis(stack, 4, "full", old, method="svd")
    stack = stack.clone()
    stack[1, 0, 0] = float("nan")
    new = find_basis(stack, 4, "full", old, method="svd", shards=of_stacks)
    for found, before, wanted in zip(
        (new.left, new.right), (old.left, old.right), (expected.left, expected.right), strict=True
    ):
        assert torch.equal(found[1], before[1])
        torch.testing.assert_close(found[0::2], wanted[0::2], rtol=0, atol=0)


def test_a_gradient_of_zeros_leaves_the_basis_as_it_is():
    old = find_basis(gradient(12, 20), 4, "std")
    new = find_basis(torch.zeros(12, 20), 4, "std", old)
    torch.testing.assert_close(new.left, old.left, rtol=0, atol=2e-6)


def test_a_gradient_of_lower_rank_than_the_basis_gives_a_whole_basis():
    matrix = gradient(40, 60)[:, :3] @ gradient(3, 60, seed=4)
    for old in (None, find_basis(gradient(40, 60, seed=5), 16, "std")):
        basis = find_basis(matrix, 16, "std", old)
        assert is_orthonormal(basis.left)
        assert (basis.down(matrix).norm() / matrix.norm()) > 0.999


@pytest.mark.parametrize("factor", [1e-18, 1e15])
def test_the_size_of_a_gradient_does_not_matter(factor):
    matrix = gradient(20, 30)
    old = find_basis(gradient(20, 30, seed=1), 5, "std")
    usual, scaled = (find_basis(m, 5, "std", old).left for m in (matrix, matrix * factor))
    torch.testing.assert_close(usual, scaled, rtol=0, atol=1e-5)


def test_a_stack_has_the_bases_of_its_matrices():
    stack = gradient(12, 20, batch=(3,))
    old = find_basis(gradient(12, 20, seed=1, batch=(3,)), 4, "std")
    together = find_basis(stack, 4, "std", old).left
    for n in range(3):
        alone = find_basis(stack[n], 4, "std", Basis(old.left[n], None)).left
        torch.testing.assert_close(together[n], alone, rtol=0, atol=1e-5)


def test_another_rank_keeps_the_directions_that_are_there():
    matrix = gradient(20, 30)
    old = find_basis(matrix, 4, "std")
    for rank in (2, 8):
        basis = find_basis(matrix, rank, "std", old)
        assert basis.rank == rank
        assert is_orthonormal(basis.left)


def test_random_starts_depend_on_their_key_alone():
    torch.manual_seed(0)
    first = seeded_normal((3, 4), torch.zeros(1), (1, 2, 3))
    torch.manual_seed(5)
    assert torch.equal(first, seeded_normal((3, 4), torch.zeros(1), (1, 2, 3)))
    assert not torch.equal(first, seeded_normal((3, 4), torch.zeros(1), (1, 2, 4)))
    before = torch.get_rng_state()
    find_basis(gradient(12, 20), 4, "std")
    assert torch.equal(before, torch.get_rng_state())


def test_columns_that_are_not_independent_give_nan_and_no_error():
    assert orthonormalise(torch.zeros(5, 2)).isnan().all()


@pytest.mark.parametrize(("count", "gap"), [(12, 5), (5, 12), (7, 7), (1, 3)])
def test_matrices_take_turns_and_each_has_one_in_every_gap(count, gap):
    due = [[is_due(t, gap, index=i, count=count, staggers=True) for i in range(count)] for t in range(1, 3 * gap + 1)]
    assert max(map(sum, due)) <= -(-count // gap)
    for index in range(count):
        turns = [t for t, row in enumerate(due) if row[index]]
        assert len(turns) == 3
        assert {b - a for a, b in itertools.pairwise(turns)} == {gap}


def test_without_turns_all_are_due_together():
    due = [t for t in range(13) if is_due(t, 4, index=3, count=9, staggers=False)]
    assert due == [4, 8, 12]


@pytest.mark.parametrize("proj_type", ["left", "right", "full"])
def test_moments_are_carried_over_to_another_basis(proj_type):
    matrix = gradient(12, 20)
    old = find_basis(matrix, 12, proj_type)  # all directions of the shorter side
    new = find_basis(gradient(12, 20, seed=2), 12, proj_type, old)
    rotation = Rotation(old, new)
    if proj_type == "left":  # nothing is lost: what is known of the first moment is known in the new coordinates
        torch.testing.assert_close(rotation.first(old.down(matrix)), new.down(matrix), rtol=1e-4, atol=1e-5)
    moment = old.down(matrix).square()
    assert (rotation.second(moment) >= 0).all()
    same = Rotation(old, old)
    torch.testing.assert_close(same.first(old.down(matrix)), old.down(matrix), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(same.second(moment), moment, rtol=1e-4, atol=1e-6)


def test_factored_second_moments_are_carried_over_as_whole_ones_are():
    old, new = find_basis(gradient(12, 20), 4, "full"), find_basis(gradient(12, 20, seed=2), 4, "full")
    rotation, moment = Rotation(old, new), torch.rand(4, 4, generator=torch.Generator().manual_seed(0))
    left_only = Rotation(Basis(old.left, None), Basis(new.left, None))
    torch.testing.assert_close(left_only.second(moment).mean(-1), left_only.second_rows(moment.mean(-1)))
    right_only = Rotation(Basis(None, old.right), Basis(None, new.right))
    torch.testing.assert_close(right_only.second(moment).mean(-2), right_only.second_columns(moment.mean(-2)))
    assert rotation.second_rows(moment.mean(-1)).shape == (4,)
