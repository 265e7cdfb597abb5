"""Small models that optimizers which update during the backward pass are tried on."""

import copy

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class Shapes(nn.Module):
    """Has a vector, a matrix, three- and four-dimensional weights, one that is large, and one that is not used."""

    def __init__(self):
        super().__init__()
        self.convolution = nn.Conv2d(2, 3, 3, bias=False)  # (3, 2, 3, 3)
        self.experts = nn.Parameter(torch.randn(2, 12, 5) / 3)
        self.norm = nn.LayerNorm(10)
        self.head = nn.Linear(10, 4)
        self.unused = nn.Linear(2, 2)

    def forward(self, inputs):
        hidden = torch.tanh(self.convolution(inputs)).flatten(1)  # (n, 3 * 2 * 2)
        return self.head(self.norm(torch.einsum("ni,eij->nej", hidden, self.experts).flatten(1)))

    @staticmethod
    def batch(step, rows=6):
        generator = torch.Generator().manual_seed(step)
        return torch.randn(rows, 2, 4, 4, generator=generator)


class Tied(nn.Module):
    """Embeds and reads out with one weight, and calls one layer three times."""

    def __init__(self, reentrant=None):
        super().__init__()
        self.reentrant = reentrant
        self.embedding = nn.Embedding(7, 8)
        self.layer = nn.Linear(8, 8)
        self.head = nn.Linear(8, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        hidden = self.embedding(tokens)
        for _ in range(3):
            hidden = self._segment(lambda x: torch.tanh(self.layer(x)), hidden)
        return self._segment(self.head, hidden)

    def _segment(self, function, hidden):
        if self.reentrant is None:
            return function(hidden)
        return checkpoint(function, hidden, use_reentrant=self.reentrant)

    @staticmethod
    def batch(step, rows=6):
        return torch.randint(7, (rows, 3), generator=torch.Generator().manual_seed(step))


def build(kind=Shapes, **options):
    torch.manual_seed(0)
    return kind(**options)


def loss_of(model, batch):
    return model(batch).square().mean()


def train(model, optimizer, steps, *, start=0, max_norm=None, batch=None):
    """Train with an optimizer that updates during the backward pass; return its norms."""
    norms = []
    for step in range(start, start + steps):
        optimizer.backward(loss_of(model, (batch or model.batch)(step)))
        norms.append(optimizer.clip_grad_norm(max_norm).item())
        optimizer.step()
        optimizer.zero_grad()
    return norms


def train_plainly(model, optimizer, steps, *, start=0, max_norm=None, decay=0.0, max_value=None, batch=None):
    """Train with an ordinary optimizer; return the norms before clipping. `decay` shrinks the weights before a step."""
    norms, parameters = [], [p for group in optimizer.param_groups for p in group["params"]]
    for step in range(start, start + steps):
        optimizer.zero_grad()
        loss_of(model, (batch or model.batch)(step)).backward()
        norms.append(nn.utils.clip_grad_norm_(parameters, torch.inf if max_norm is None else max_norm).item())
        if max_value is not None:
            nn.utils.clip_grad_value_(parameters, max_value)
        with torch.no_grad():
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.mul_(1 - decay)
        optimizer.step()
    return norms


def weights_of(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def greatest_difference(first, second):
    pairs = zip(first.parameters(), second.parameters(), strict=True)
    return max((a.detach().float() - b.detach().float()).abs().max().item() for a, b in pairs)


def assert_same_bits(first, second):
    for (name, a), b in zip(first.items(), second.values(), strict=True):
        assert torch.equal(a, b), name


def copy_of_state(optimizer):
    return copy.deepcopy(optimizer.state_dict())
