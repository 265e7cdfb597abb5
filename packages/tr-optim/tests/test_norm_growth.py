"""The limiter of norms' growth by itself, and norms of matrices in stacks."""

import pytest
import torch
from torch import nn

from tr_optim import APOLLOAdamW, FiraAdamW
from tr_optim.engine.norm_growth import NormGrowthLimiter
from tr_optim.moments.adafactor import blocks_of


def limit(norm, before, growth=1.5):
    state = {"scaled_norm": torch.tensor(before), "step": torch.tensor(1.0)}
    return NormGrowthLimiter()(torch.tensor(norm), state, {"norm_growth": growth}).tolist(), state[
        "scaled_norm"
    ].tolist()


@pytest.mark.parametrize(
    ("norm", "before", "factor", "after"),
    [
        (2.0, 0.0, 1.0, 2.0),  # the first one
        (2.0, 1.0, 0.75, 1.5),
        (1.5, 1.0, 1.0, 1.5),
        (0.5, 1.0, 1.0, 0.5),
        (0.0, 1.0, 1.0, 1.0),  # nothing to grow from is not remembered
        (float("nan"), 1.0, 1.0, 1.0),
        (float("inf"), 0.0, 1.0, 0.0),
    ],
)
def test_a_norm_grows_by_no_more_than_its_factor_and_only_numbers_are_remembered(norm, before, factor, after):
    assert limit(norm, before) == (factor, after)


def test_without_a_limit_nothing_is_changed_or_remembered():
    assert limit([2.0, 3.0], [1.0, 1.0], None) == ([1.0, 1.0], [1.0, 1.0])


KINDS = {
    "apollo": lambda p: APOLLOAdamW(p, scale_type="tensor", proj="svd", lr=0.1, rank=2, norm_growth=1.2),
    "fira": lambda p: FiraAdamW(p, method="svd", lr=0.1, rank=2, norm_growth=1.2),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_stack_of_matrices_is_updated_with_norms_of_its_matrices(kind):
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(3, 5, 8, generator=generator)
    stack, single = nn.Parameter(start.clone()), nn.Parameter(start[1:2].clone())
    optimizers = [KINDS[kind]([parameter]) for parameter in (stack, single)]
    for step in range(4):
        stack.grad = torch.randn(3, 5, 8, generator=generator) * (1 + 9 * step)
        stack.grad[2] *= 100
        single.grad = stack.grad[1:2].clone()
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(stack[1:2], single, rtol=1e-5, atol=1e-6)
    assert (single - start[1:2]).abs().max() > 1e-2


@pytest.mark.parametrize(("shape", "limit", "sizes"), [
    ((3, 4, 5), 1000, [60]),
    ((3, 4, 5), 40, [40, 20]),
    ((3, 4, 5), 20, [20, 20, 20]),
    ((3, 4, 5), 10, [10] * 6),
    ((3, 4, 5), 5, [5] * 12),
    ((3, 4, 5), 2, [5] * 12),  # a row at least
    ((1, 7, 3), 9, [9, 9, 3]),
    ((2, 0, 3), 9, []),
])  # fmt: skip
def test_large_tensors_are_taken_in_pieces_of_the_size_that_is_set(monkeypatch, shape, limit, sizes):
    monkeypatch.setattr("tr_optim.engine.precision.piece_size", lambda tensor: limit)
    tensor = torch.arange(torch.Size(shape).numel()).view(shape)
    pieces = [tensor[matrices, rows] for matrices, rows in blocks_of(tensor)]
    assert [piece.numel() for piece in pieces] == sizes
    assert torch.cat([piece.flatten() for piece in pieces] or [tensor.flatten()]).tolist() == tensor.flatten().tolist()
