import pytest
import torch
from galore_runs import groups, net, train
from test_apollo import OWN, SHAPES, gradients, step_by_step
from torch import nn
from whole_gradient_equations import fira

from tr_optim import FiraAdamW, GaLoreAdamW


@pytest.mark.parametrize("proj_type", SHAPES)
@pytest.mark.parametrize("rotates", [True, False])
def test_updates_are_those_of_the_equations(proj_type, rotates):
    shape = SHAPES[proj_type]
    given = gradients(shape)
    start = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    parameter = nn.Parameter(start.clone())
    options = {"rank": 4, "update_proj_gap": 4, "scale": 0.5, "proj_type": proj_type, "rotate_moments": rotates}
    optimizer = FiraAdamW([parameter], **OWN, **options, method="svd", stagger=False)
    found = step_by_step(optimizer, parameter, given)
    turns = proj_type in ("reverse_std", "right")
    as_left = [g.T for g in given] if turns else given
    expected = fira(start.T if turns else start, as_left, rank=4, gap=4, rotates=rotates, scale=0.5, **OWN)
    torch.testing.assert_close(found, expected.T if turns else expected, rtol=0, atol=1e-12)
    assert (found - start).abs().max() > 1e-2


def test_without_what_the_projection_leaves_it_is_galore():
    """Gradients of the basis's rank leave nothing, but for rounding."""
    generator = torch.Generator().manual_seed(0)
    left = torch.randn(10, 4, generator=generator, dtype=torch.float64)
    given = [left @ torch.randn(4, 16, generator=generator, dtype=torch.float64) for _ in range(9)]
    found = []
    for kind in (FiraAdamW, GaLoreAdamW):
        parameter = nn.Parameter(torch.ones(10, 16, dtype=torch.float64))
        optimizer = kind([parameter], **OWN, rank=4, update_proj_gap=4, scale=1.0, method="svd")
        found.append(step_by_step(optimizer, parameter, given))
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=1e-12)


def test_it_trains_in_directions_that_the_projection_leaves_out():
    moved = []
    for kind in (FiraAdamW, GaLoreAdamW):
        model = net()
        start = model[2].weight.detach().clone()
        optimizer = kind(groups(model, rank=2, update_proj_gap=1000), 1e-3)
        train(optimizer, model, last=6)
        moved.append(torch.linalg.matrix_rank((model[2].weight - start).double(), rtol=1e-4).item())
    assert moved[1] <= 2
    assert moved[0] > 20


def test_a_column_whose_projection_is_zero_gets_no_rest():
    parameter = nn.Parameter(torch.zeros(6, 8))
    optimizer = FiraAdamW([parameter], lr=1e-2, rank=2, update_proj_gap=1000)
    gradient = torch.zeros(6, 8)
    gradient[:2] = torch.randn(2, 8, generator=torch.Generator().manual_seed(0))
    step_by_step(optimizer, parameter, [gradient])
    outside = torch.zeros(6, 8)
    outside[4, 3] = 1.0  # at right angles to the basis, in a column that has moments
    outside[:2, :3] = gradient[:2, :3]
    before = parameter.detach().clone()
    moved = step_by_step(optimizer, parameter, [outside]) - before
    assert moved.isfinite().all()
    assert moved.abs().max() < 0.1
