"""Optimizers that average gradients themselves train under DDP without the memory for its buckets."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))  # in the processes of ranks too

from optimizer_combination_runs import Combination, trainer_of, weights_of
from optimizer_settings import GALORE, PROJECTS, Setting

from tr_dist.testing import run_ranks

PROJECTING = {**PROJECTS, "optim_args": GALORE}
SETTINGS = {
    Setting("lomo"): False,
    Setting("adalomo", "clipped"): False,
    Setting("galore_adamw_layerwise", options=PROJECTING): False,
    Setting("galore_adamw", options=PROJECTING): True,
    Setting("sgd"): True,
}


def train_on_rank(folder, setting):
    combination = Combination(setting, 1, setting.way == "clipped", "fp32", "none", True, 2, "trainer")
    made = trainer_of(combination, setting, folder, max_steps=3)
    made.train()
    return made.model_wrapped.has_buckets, weights_of(made.model)


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_there_are_buckets_only_where_the_strategy_averages(tmp_path, setting):
    (first_has, first), (second_has, second) = run_ranks(train_on_rank, 2, str(tmp_path), setting)
    assert first_has == second_has == SETTINGS[setting]
    assert torch.equal(first, second)
