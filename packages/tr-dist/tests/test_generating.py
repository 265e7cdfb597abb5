"""Generate with a model's own method: a rank that is done goes on for the others, which need its shards."""

import pytest
import torch
from torch import nn

from tr_dist.fsdp import FSDP, Sharding
from tr_dist.sharded_model import synced_generation
from tr_dist.testing import run_ranks

BY_LAYER = Sharding(wrap="SIZE_BASED_WRAP", min_num_params=20)


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.forwards = nn.Linear(5, 5), nn.Linear(5, 5), 0
        self.scale = nn.Parameter(torch.rand(5))  # of no layer: gathered with the model itself

    def forward(self, x):
        self.forwards += 1
        return self.second(torch.tanh(self.first(x))) * self.scale

    def generate(self, x, times):
        """Apply the model to its own output so many times."""
        for _ in range(times):
            x = self(x)
        return x


class Synced(Counting):
    def generate(self, x, times, synced_gpus=False):
        return super().generate(x, times)


class Around(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Synced()

    def generate(self, *inputs, **options):
        return self.inner.generate(*inputs, **options)


def generate(times_by_rank):
    with FSDP(BY_LAYER, use_cpu=True) as strategy, torch.no_grad():
        model = Counting()
        strategy.prepare(model)
        rows = []
        for times in (times_by_rank[strategy.rank], 2):  # a second time, to see that nothing is left of the first
            rows.append(model.generate(torch.ones(1, 5), times))
        return rows, model.forwards


def test_ranks_make_as_many_forwards_and_keep_their_own_results():
    alone = Counting()
    with torch.no_grad():
        expected = [alone.generate(torch.ones(1, 5), times) for times in range(6)]
    ranks = run_ranks(generate, 3, (1, 5, 3), timeout_s=60)
    for times, ((first, second), forwards) in zip((1, 5, 3), ranks, strict=True):
        assert torch.equal(first, expected[times])
        assert torch.equal(second, expected[2])
        assert forwards == 5 + 2


def test_a_rank_that_made_no_forward_cannot_go_on_and_says_so():
    with pytest.raises(RuntimeError, match="Counting.generate made no forward on this rank, and others need"):
        run_ranks(generate, 2, (0, 2), timeout_s=60)


@pytest.mark.parametrize(("model", "is_replaced"), [(Counting(), True), (Synced(), False), (Around(), False)])
def test_methods_that_go_on_by_themselves_are_left_as_they_are(model, is_replaced):
    given = model.generate
    synced_generation(model, torch.clone, torch.device("cpu"))
    assert (model.generate != given) is is_replaced
    again = model.generate
    synced_generation(model, torch.clone, torch.device("cpu"))
    assert model.generate == again
