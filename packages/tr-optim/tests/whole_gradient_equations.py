"""APOLLO and Fira as plainly as their equations are written, in float64; for one matrix of more columns than rows."""

from __future__ import annotations

import torch


def adam(r, m, v, t, betas, eps):
    m = betas[0] * m + (1 - betas[0]) * r
    v = betas[1] * v + (1 - betas[1]) * r * r
    return m, v, (m / (1 - betas[0] ** t)) / ((v / (1 - betas[1] ** t)).sqrt() + eps)


def limited(s, before, growth):
    norm = (s * s).sum().sqrt()
    if before is not None and norm > growth * before:
        s, norm = s * (growth * before / norm), growth * before
    return s, norm


def apollo(w, gradients, directions, *, scale, lr, betas, eps, weight_decay, growth=1.01, by_tensor=False):
    """`directions(t)` is P, `m x r`, in step t from 1."""
    w, m, v, before = w.double().clone(), 0.0, 0.0, None
    for t, g in enumerate(gradients, start=1):
        g = g.double()
        r = directions(t).double().T @ g
        m, v, n = adam(r, m, v, t, betas, eps)
        if by_tensor:
            s = g * ((n * n).sum() / (r * r).sum()).sqrt()
        else:
            s = g @ torch.diag(((n * n).sum(0) / (r * r).sum(0)).sqrt())
        s, before = limited(s, before, growth)
        w = w - lr * weight_decay * w - lr * scale**0.5 * s
    return w


def fira(w, gradients, *, rank, gap, rotates, scale, lr, betas, eps, weight_decay, growth=1.01):
    """With bases by singular value decomposition, the largest entry of each column being positive."""
    w, m, v, p, before = w.double().clone(), 0.0, 0.0, None, None
    for t, g in enumerate(gradients, start=1):
        g = g.double()
        if (t - 1) % gap == 0:
            u = torch.linalg.svd(g, full_matrices=False)[0][:, :rank]
            new = u * u.gather(0, u.abs().argmax(0, keepdim=True)).sign()
            if p is not None and rotates:
                c = new.T @ p
                m, v = c @ m, (c * c) @ v
            p = new
        r = p.T @ g
        m, v, n = adam(r, m, v, t, betas, eps)
        phi = torch.diag(((n * n).sum(0) / (r * r).sum(0)).sqrt())
        s, before = limited((g - p @ r) @ phi, before, growth)
        w = w - lr * weight_decay * w - lr * (scale * p @ n + s)
    return w
