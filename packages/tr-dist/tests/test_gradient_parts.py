import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tr_dist import DDP
from tr_dist.testing import run_ranks


class Tied(nn.Module):
    """Reads out in a checkpointed segment with the weight that it embeds by.

    The embedding's part of the gradient comes last, when torch takes all gradients to be there: it does not notice.
    """

    def __init__(self, reentrant):
        super().__init__()
        torch.manual_seed(0)
        self.reentrant = reentrant
        self.embedding, self.layer = nn.Embedding(7, 8), nn.Linear(8, 8)
        self.head = nn.Linear(8, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        hidden = self.embedding(tokens)
        hidden = checkpoint(lambda h: torch.tanh(self.layer(h)), hidden, use_reentrant=self.reentrant)
        return checkpoint(self.head, hidden, use_reentrant=self.reentrant)


def train_on_rank(reentrant, **options):
    with DDP(use_cpu=True, **options) as strategy:
        model = strategy.prepare(Tied(reentrant))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        for step in range(4):
            for k in range(2):
                generator = torch.Generator().manual_seed(10 * step + 2 * k + strategy.rank)
                tokens = torch.randint(7, (4, 3), generator=generator)
                with strategy.accumulate(model, sync=k == 1):
                    strategy.backward(model(tokens).square().mean() / 2)
            strategy.step(optimizer)
            optimizer.zero_grad()
            assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
        return torch.cat([p.detach().flatten() for p in model.parameters()])


def static_on_rank(reentrant):
    return train_on_rank(reentrant, static_graph=True)


def test_replicas_that_would_average_a_part_of_a_gradient_are_refused_in_the_first_step():
    message = r"the gradient of \w+.weight comes in several parts .* use_reentrant=False .*--ddp_static_graph true"
    with pytest.raises(RuntimeError, match=message):
        run_ranks(train_on_rank, 2, True)


def test_what_the_refusal_proposes_gives_the_same_weights_on_all_ranks():
    expected = run_ranks(train_on_rank, 2, False)
    found = run_ranks(static_on_rank, 2, True)
    assert torch.equal(found[0], found[1])
    torch.testing.assert_close(found[0], expected[0], rtol=0, atol=1e-6)
