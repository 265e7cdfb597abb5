"""What compat="apollo-torch" and compat="fira" compute, beside equations as those packages have them."""

import math

import pytest
import torch
from test_apollo import OWN, SHAPES, directions, gradients, step_by_step
from torch import nn

from tr_optim import APOLLOAdamW, FiraAdamW

B1, B2 = OWN["betas"]


class Moments:
    """Adam with eps before the bias correction."""

    def __init__(self):
        self.m = self.v = 0.0

    def __call__(self, r, t):
        self.m, self.v = B1 * self.m + (1 - B1) * r, B2 * self.v + (1 - B2) * r * r
        correction = math.sqrt(1 - B2**t) / (1 - B1**t)
        return self.m / (self.v.sqrt() + OWN["eps"]) * correction, correction


class Limit:
    """The limit of a norm's growth, of norms before the bias correction."""

    before = None

    def __call__(self, s, correction, growth=1.01):
        norm = s.norm() / correction
        if self.before is not None and norm > growth * self.before:
            s, norm = s * (growth * self.before / norm), growth * self.before
        self.before = norm
        return s


def ratio(new, old, by_tensor):
    return new.norm() / old.norm() if by_tensor else (new.norm(dim=0) / old.norm(dim=0))[None]


def apollo(w, given, basis_of, scale, by_tensor):
    moments, limit = Moments(), Limit()
    for t, g in enumerate(given, start=1):
        r = basis_of(t).T @ g
        n, correction = moments(r, t)
        w = w - OWN["lr"] * math.sqrt(scale) * limit(g * ratio(n, r, by_tensor), correction)
        w = w - OWN["lr"] * OWN["weight_decay"] * w
    return w


def fira(w, given, rank, gap, scale, turns):
    moments, limit = Moments(), Limit()
    for t, g in enumerate(given, start=1):
        if (t - 1) % gap == 0:
            # Any sign will do for a column, and moments are not turned with it: it is that of the matrix as it is.
            u, _, vh = torch.linalg.svd(g.T if turns else g, full_matrices=False)
            p = vh[:rank].T if turns else u[:, :rank]
        r = p.T @ g
        n, correction = moments(r, t)
        rest = limit((g - scale * p @ r) * ratio(n, r, False), correction)
        w = w - OWN["lr"] * (scale * p @ n + rest)
        w = w - OWN["lr"] * OWN["weight_decay"] * w
    return w


def setting(proj_type):
    shape = SHAPES[proj_type]
    start = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    turns = proj_type in ("reverse_std", "right")  # from the right: the equations of the transpose
    given = gradients(shape)
    return start, given, (lambda x: x.T) if turns else (lambda x: x)


@pytest.mark.parametrize("proj_type", SHAPES)
@pytest.mark.parametrize("scale_type", ["channel", "tensor"])
def test_apollo_is_that_of_apollo_torch(proj_type, scale_type):
    start, given, turn = setting(proj_type)
    parameter = nn.Parameter(start.clone())
    options = {"rank": 4, "update_proj_gap": 4, "scale": 3.0, "proj_type": proj_type, "scale_type": scale_type}
    optimizer = APOLLOAdamW([parameter], **OWN, **options, seed=7, compat="apollo-torch")
    found = step_by_step(optimizer, parameter, given)
    as_left = [turn(g) for g in given]
    drawn = directions(as_left[0].shape[0], 4, 4, seed=7)
    expected = apollo(turn(start), as_left, drawn, 3.0, scale_type == "tensor")
    torch.testing.assert_close(found, turn(expected), rtol=0, atol=1e-12)


@pytest.mark.parametrize("proj_type", SHAPES)
def test_fira_is_that_of_the_package(proj_type):
    start, given, turn = setting(proj_type)
    parameter = nn.Parameter(start.clone())
    options = {"rank": 4, "update_proj_gap": 4, "scale": 0.5, "proj_type": proj_type}
    found = step_by_step(FiraAdamW([parameter], **OWN, **options, compat="fira"), parameter, given)
    expected = fira(turn(start), [turn(g) for g in given], 4, 4, 0.5, proj_type in ("reverse_std", "right"))
    torch.testing.assert_close(found, turn(expected), rtol=0, atol=1e-12)
