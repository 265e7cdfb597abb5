"""Optimizers that average gradients themselves train under DDP without the memory for its buckets."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))  # in the processes of ranks too

from lomo_runs import trained, weights_of

from tr_dist.testing import run_ranks

SETTINGS = {
    "lomo": ({"optim": "lomo"}, False),
    "adalomo, clipped": ({"optim": "adalomo", "max_grad_norm": 0.5}, False),
    "galore_adamw_layerwise": (
        {"optim": "galore_adamw_layerwise", "optim_target_modules": "all-linear", "optim_args": "rank=4"},
        False,
    ),
    "galore_adamw": (
        {"optim": "galore_adamw", "optim_target_modules": "all-linear", "optim_args": "rank=4"},
        True,
    ),
    "sgd": ({"optim": "sgd"}, True),
}


def train_on_rank(folder, options):
    made = trained(folder, max_steps=3, **options)
    return made.model_wrapped.has_buckets, weights_of(made)


@pytest.mark.parametrize("setting", SETTINGS)
def test_there_are_buckets_only_where_the_strategy_averages(tmp_path, setting):
    options, needs_buckets = SETTINGS[setting]
    (first_has, first), (second_has, second) = run_ranks(train_on_rank, 2, str(tmp_path), options)
    assert first_has == second_has == needs_buckets
    torch.testing.assert_close(first, second, rtol=0, atol=0)
