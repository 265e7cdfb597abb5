"""GaLoreAdafactor beside its equations, written as plainly as they are."""

import pytest
import torch
from torch import nn

from tr_optim import GaLoreAdafactor

OWN = {"lr": 3e-2, "eps": (1e-8, 1e-2), "clip_threshold": 0.7, "decay_rate": -0.6, "weight_decay": 0.1}
SIDES = {"left": (True, False), "right": (False, True), "full": (True, True)}


def adafactor_in_float64(start, gradients, sides, *, rank, gap, scale, beta1):
    lr, (eps, least), clip, decay, weight_decay = OWN.values()
    w, first, row, column, left, right = start.clone(), 0.0, 0.0, 0.0, None, None
    for t, g in enumerate(gradients, start=1):
        if (t - 1) % gap == 0:
            u, _, vh = torch.linalg.svd(g)
            found = zip((u, vh.T), sides, g.shape, strict=True)
            new = [x[:, :rank] if taken else torch.eye(n, dtype=g.dtype) for x, taken, n in found]
            if left is not None:
                a, b = new[0].T @ left, new[1].T @ right
                first, row, column = a @ first @ b.T, (a * a) @ row, (b * b) @ column
            left, right = new
        r = left.T @ g @ right
        new = t**decay
        row = (1 - new) * row + new * (r * r + eps).mean(1)
        column = (1 - new) * column + new * (r * r + eps).mean(0)
        update = r / (torch.outer(row, column) / row.mean()).sqrt()
        update = update / max(1.0, float(update.square().mean().sqrt()) / clip)
        rate = lr * max(least, float(w.square().mean().sqrt()))
        first = beta1 * first + (1 - beta1) * rate * update
        w = w * (1 - weight_decay * rate) - scale * left @ first @ right.T
    return w, first, row, column


@pytest.mark.parametrize("mode", ["step", "immediate"])
@pytest.mark.parametrize("proj_type", SIDES)
def test_updates_and_moments_are_those_of_the_equations_over_several_bases(proj_type, mode):
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(10, 16, generator=generator, dtype=torch.float64)
    gradients = [torch.randn(10, 16, generator=generator, dtype=torch.float64) for _ in range(9)]
    projection = {"rank": 4, "scale": 0.3}
    parameter = nn.Parameter(start.clone())
    group = [{"params": [parameter], "proj_type": proj_type}]
    engine = {"update_proj_gap": 3, "method": "svd", "stagger": False, "relative_step": False, "mode": mode}
    optimizer = GaLoreAdafactor(group, **OWN, **projection, **engine, beta1=0.6)
    for gradient in gradients:
        loss = (parameter * gradient).sum()
        optimizer.backward(loss, last=True) if mode == "immediate" else loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    weights, first, row, column = adafactor_in_float64(
        start, gradients, SIDES[proj_type], gap=3, beta1=0.6, **projection
    )
    torch.testing.assert_close(parameter.detach(), weights, rtol=0, atol=1e-10)
    state = optimizer.state[parameter]
    # A direction's sign is free: the first moment has it, and the second does not.
    torch.testing.assert_close(state["exp_avg"].double().abs(), first.abs(), rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(state["exp_avg_sq_row"].double(), row, rtol=1e-6, atol=0)
    torch.testing.assert_close(state["exp_avg_sq_col"].double(), column, rtol=1e-6, atol=0)
