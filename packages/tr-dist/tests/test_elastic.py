"""Sums in a fixed tree, and norms that do not depend on how a tensor is divided."""

import itertools

import pytest
import torch

from tr_dist.elastic import TreeSum, added_in_pairs, halved, put_together, scattered, squares_of_rows
from tr_dist.testing import run_ranks


def leaves(number, size=1001):
    return [torch.randn(size, generator=torch.Generator().manual_seed(seed)) for seed in range(number)]


def tree(parts):
    """Add recursively, as the tree is defined."""
    if len(parts) == 1:
        return parts[0]
    middle = len(parts) // 2
    return tree(parts[:middle]) + tree(parts[middle:])


@pytest.mark.parametrize("number", [1, 2, 4, 8, 16])
def test_a_tree_of_lists_adds_neighbours_first_and_holds_few(number):
    total, most = TreeSum(), 0
    for leaf in leaves(number):
        total.add([leaf.clone()])
        most = max(most, len(total._partial))
    assert torch.equal(total.total[0], tree(leaves(number)))
    assert torch.equal(added_in_pairs(torch.stack(leaves(number))), tree(leaves(number)))
    assert most <= number.bit_length()


def test_sums_in_order_have_other_bits():
    in_order = torch.zeros(1001)
    for leaf in leaves(8):
        in_order += leaf
    assert not torch.equal(in_order, tree(leaves(8)))


def added(shards):
    from tr_dist import DDP

    with DDP(use_cpu=True) as strategy:
        total, size = TreeSum(), strategy.world_size
        for first in range(0, len(shards), size):
            mine = shards[min(first + strategy.rank, len(shards) - 1)]
            for part in scattered(mine, len(shards) - first):
                total.add([part.clone()])
        found = [torch.empty_like(tensor) for tensor in mine]
        put_together(found, total.total[0])
        return found


@pytest.mark.parametrize(("ranks", "shards"), [(2, 2), (2, 8), (3, 8), (4, 4), (5, 8)])
def test_ranks_have_the_sum_of_the_tree(ranks, shards):
    parts = [[leaf, leaf[:7].reshape(7, 1) * 3] for leaf in leaves(shards)]
    expected = [tree([part[place] for part in parts]) for place in (0, 1)]
    for found in run_ranks(added, ranks, parts):  # each has all shards, and adds its own
        for mine, wanted in itertools.zip_longest(found, expected):
            assert torch.equal(mine, wanted)


@pytest.mark.parametrize("shape", [(), (7,), (33, 1), (1, 1), (50, 17), (9, 4, 3)])
def test_squares_of_rows_do_not_depend_on_the_number_of_rows(shape):
    whole = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    squares = squares_of_rows(whole)
    assert squares == pytest.approx(torch.atleast_1d(whole).double().square().reshape(len(squares), -1).sum(1))
    if whole.dim() and len(whole):
        assert torch.equal(squares, torch.cat([squares_of_rows(part) for part in whole.split(3)]))


def test_a_process_without_rows_adds_nothing():
    assert squares_of_rows(torch.zeros(0, 5)).shape == (0,)


def test_halves_are_the_sum():
    rows = torch.arange(35.0).reshape(5, 7)
    assert torch.equal(halved(rows), rows.sum(1))
