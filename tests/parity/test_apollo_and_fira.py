"""APOLLO and Fira with `compat` against the authors' packages, apollo-torch 1.0 and fira 1.0."""

from itertools import count

import pytest
import torch
from parity_libraries import modules_of
from torch import nn

from tr_optim import APOLLOAdamW, FiraAdamW
from tr_optim.testing import seeded_normal

STEPS, GAP = 12, 4
SHAPES = [(10, 16), (16, 10), (12, 12)]
OWN = {"lr": 3e-2, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}


def starts():
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def gradients():
    """Return gradients that grow and shrink, so that the limiter acts."""
    generator = torch.Generator().manual_seed(1)
    return [[torch.randn(shape, generator=generator) * (1 + 5 * t % 3) for shape in SHAPES] for t in range(STEPS)]


def trained(parameters, optimizer):
    for step in gradients():
        for parameter, gradient in zip(parameters, step, strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in parameters])


def check(ours, theirs):
    start = torch.cat([p.detach().flatten() for p in starts()])
    assert (ours - start).abs().max() > 0.1
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("scale_type", "scale", "proj"), [("channel", 1.0, "random"), ("tensor", 128.0, "random"), ("channel", 2.0, "svd")]
)
def test_apollo_is_apollo_torch_with_the_same_random_numbers(monkeypatch, scale_type, scale, proj):
    options = {"rank": 4, "scale": scale, "update_proj_gap": GAP, "scale_type": scale_type, "proj": proj}
    apollo, projector = modules_of("apollo_torch", "apollo", "random_projector")
    numbers = {index + 1: count() for index in range(len(SHAPES))}  # by the seed that each parameter begins with

    def ours_in_place_of_theirs(self, weights, rank, type, seed):
        if not hasattr(self, "first_seed"):
            self.first_seed = seed
        key = (0, self.first_seed - 1, "basis", next(numbers[self.first_seed]))
        columns = seeded_normal((weights.shape[type == "right"], rank), weights, key) / rank**0.5
        return columns if type == "left" else columns.T

    monkeypatch.setattr(projector.GradientProjector, "get_orthogonal_matrix", ours_in_place_of_theirs)
    parameters = starts()
    groups = [{"params": parameters, "proj_type": "std", **options}]
    theirs = trained(parameters, apollo.AdamW(groups, **OWN))
    parameters = starts()
    check(trained(parameters, APOLLOAdamW(parameters, **OWN, **options, compat="apollo-torch")), theirs)


@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_fira_is_the_package_of_that_name(scale):
    options = {"rank": 4, "update_proj_gap": GAP, "proj_type": "std"}
    [fira] = modules_of("fira", "fira_adamw")
    parameters = starts()
    groups = [{"params": parameters, "alpha": scale, **options}]
    theirs = trained(parameters, fira.AdamW(groups, **OWN, no_deprecation_warning=True))
    parameters = starts()
    check(trained(parameters, FiraAdamW(parameters, **OWN, **options, scale=scale, compat="fira")), theirs)
