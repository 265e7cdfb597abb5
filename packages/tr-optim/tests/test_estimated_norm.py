"""How well the norm of a gradient is estimated that is never there at once: of a language model's real gradients."""

import argparse
from pathlib import Path

import pytest
import torch
from torch import nn

from tr_optim.engine.gradient_window import SKETCH_ROWS, Sketch
from tr_optim.projection.basis import find_basis

WIDTH, HEADS, LENGTH, RANK, GAP = 64, 4, 48, 8, 25
SEEDS, STEPS = range(40), (5, 10, 24, 40, 60)
ROWS = SKETCH_ROWS


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, hidden):
        x = self.norms[0](hidden)
        heads = [part(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in (self.query, self.key, self.value)]
        mixed = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        hidden = hidden + self.out(mixed.transpose(1, 2).flatten(2))
        return hidden + self.down(nn.functional.gelu(self.up(self.norms[1](hidden))))


def gradients_of_a_language_model():
    """Train on a module's source text; yield step and gradients of the 12 matrices in its blocks."""
    text = torch.tensor(list(Path(argparse.__file__).read_bytes()))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(256, WIDTH), Block(), Block(), nn.Linear(WIDTH, 256, bias=False))
    matrices = [p for block in model[1:3] for p in block.parameters() if p.dim() == 2]
    optimizer, generator = torch.optim.AdamW(model.parameters(), lr=2e-3), torch.Generator().manual_seed(0)
    for step in range(max(STEPS) + 1):
        starts = torch.randint(len(text) - LENGTH - 1, (8,), generator=generator)
        batch = torch.stack([text[start : start + LENGTH + 1] for start in starts])
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten()).backward()
        yield step, [p.grad for p in matrices]
        optimizer.step()


def estimate(gradients, bases, key):
    sketch, projected = Sketch(ROWS), [basis.down(g) for g, basis in zip(gradients, bases, strict=True)]
    for number, (g, basis) in enumerate(zip(gradients, bases, strict=True)):
        sketch.add(g, g, (*key, number))
        sketch.take_out(g, projected[number], basis, (*key, number))
    (rest,) = sketch.rest({}, bases.__getitem__, lambda _: key).values()
    return torch.stack([*(p.norm() for p in projected), rest.norm()]).norm()


@pytest.fixture(scope="module")
def errors():
    """Relative errors of the norm over all matrices, by step, one for each seed; a basis is up to `GAP` steps old."""
    bases, found = [None] * 12, {}
    for step, gradients in gradients_of_a_language_model():
        if step % GAP == 0:
            bases = [
                find_basis(g, RANK, "std", bases[number], method="subspace", key=(0, number, step), average=None)
                for number, g in enumerate(gradients)
            ]
        if step in STEPS:
            norm = torch.stack([g.norm() for g in gradients]).norm()
            found[step] = torch.stack([estimate(gradients, bases, (seed, step)) / norm - 1 for seed in SEEDS])
    return found


def test_the_root_mean_square_error_is_within_three_percent_in_every_step(errors):
    assert {step: of_step.square().mean().sqrt().item() for step, of_step in errors.items()} == {
        step: pytest.approx(0, abs=0.03) for step in STEPS
    }


def test_estimates_are_within_five_percent_but_for_one_in_a_hundred(errors):
    every = torch.cat(list(errors.values())).abs()
    assert (every > 0.05).float().mean() <= 1 / 100
    assert every.max() < 0.08


def test_estimates_are_not_biased_over_seeds(errors):
    for of_step in errors.values():
        squares = (1 + of_step).square()
        # Of a mean over seeds, three times its own standard deviation.
        assert (squares.mean() - 1).abs() < 3 * squares.std() / len(SEEDS) ** 0.5
    assert torch.cat(list(errors.values())).mean().abs() < 0.005


def test_a_sketch_of_a_stack_of_matrices_is_unbiased_also_where_they_are_all_alike():
    torch.manual_seed(0)
    stack = torch.randn(64, 32).expand(6, 64, 32).contiguous()  # mixed alike, their sum would be six times each
    squares = []
    for seed in SEEDS:
        sketch = Sketch(ROWS)
        sketch.add(stack, stack, (seed,))
        squares.append(next(iter(sketch.sums.values())).square().sum() / stack.square().sum())
    assert torch.stack(squares).mean().item() == pytest.approx(1, abs=0.03)
    assert torch.stack(squares).std() < 0.1


def test_gradients_of_all_shapes_are_in_one_sketch_of_a_dtype():
    sketch = Sketch(4)
    for number, shape in enumerate([(3, 5), (40, 2), (2, 6, 7)]):
        values = torch.ones(shape)
        sketch.add(values, values, (0, number))
    assert [tuple(total.shape) for total in sketch.sums.values()] == [(4, 4)]
    wide = torch.ones(3, 5, dtype=torch.float64)
    sketch.add(wide, wide, (0, 9))
    assert len(sketch.sums) == 2
