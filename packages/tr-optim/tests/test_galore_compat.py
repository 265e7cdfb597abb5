"""What compat="galore-torch" computes, beside galore-torch's own equations written down here."""

import pytest
import torch
from torch import nn

from tr_optim import GaLoreAdamW

OWN = {"lr": 3e-2, "betas": (0.8, 0.95), "eps": 1e-3, "weight_decay": 0.2}


def galore_torch(start, gradients, sides, *, rank, gap, scale):
    lr, (b1, b2), eps, decay = OWN.values()
    w, m, v = start.clone(), 0.0, 0.0
    for t, g in enumerate(gradients, start=1):
        if (t - 1) % gap == 0:  # moments stay as they are, in coordinates of the former basis
            u, _, vh = torch.linalg.svd(g, full_matrices=False)
            left = u[:, :rank] if sides[0] else torch.eye(len(g), dtype=g.dtype)
            right = vh[:rank].T if sides[1] else torch.eye(g.shape[1], dtype=g.dtype)
        r = left.T @ g @ right
        m, v = b1 * m + (1 - b1) * r, b2 * v + (1 - b2) * r * r
        update = m / (v.sqrt() + eps) * (1 - b2**t) ** 0.5 / (1 - b1**t)
        w = w - lr * scale * left @ update @ right.T
        w = w - lr * decay * w
    return w


@pytest.mark.parametrize("mode", ["step", "immediate"])
@pytest.mark.parametrize(
    ("proj_type", "sides"), [("std", (True, False)), ("right", (False, True)), ("full", (True, True))]
)
def test_updates_are_those_of_galore_torch(proj_type, sides, mode):
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(10, 16, generator=generator, dtype=torch.float64)
    gradients = [torch.randn(10, 16, generator=generator, dtype=torch.float64) for _ in range(7)]
    parameter = nn.Parameter(start.clone())
    group = {"params": [parameter], "rank": 4, "scale": 0.3, "proj_type": proj_type, "update_proj_gap": 3}
    optimizer = GaLoreAdamW([group], **OWN, compat="galore-torch", mode=mode)
    for gradient in gradients:
        loss = (parameter * gradient).sum()
        optimizer.backward(loss, last=True) if mode == "immediate" else loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    expected = galore_torch(start, gradients, sides, rank=4, gap=3, scale=0.3)
    torch.testing.assert_close(parameter.detach(), expected, rtol=0, atol=1e-10)


def test_parameters_without_a_rank_decay_after_their_update_too():
    start, gradients = torch.full((3,), 2.0, dtype=torch.float64), [torch.ones(3, dtype=torch.float64)] * 3
    parameter = nn.Parameter(start.clone())
    optimizer = GaLoreAdamW([parameter], **OWN, compat="galore-torch")
    w, m, v = start.clone(), 0.0, 0.0
    for t, gradient in enumerate(gradients, start=1):
        parameter.grad = gradient.clone()
        optimizer.step()
        m, v = 0.8 * m + 0.2 * gradient, 0.95 * v + 0.05 * gradient**2
        w = w - 3e-2 * m / (v.sqrt() + 1e-3) * (1 - 0.95**t) ** 0.5 / (1 - 0.8**t)
        w = w * (1 - 3e-2 * 0.2)
    torch.testing.assert_close(parameter.detach(), w, rtol=0, atol=1e-12)
