"""A Trainer that trains by torch's Muon: resumed at any step, on ranks, and by the modules that are named."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from adapter_runs import check_resume_at_every_step, train, train_in_shards, weights

from tr_dist.testing import run_ranks

pytestmark = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch has Muon from 2.9")


def test_a_run_resumed_at_any_step_ends_as_if_it_had_not_stopped(tmp_path):
    trainer = check_resume_at_every_step(tmp_path, optim="muon", optim_args="momentum=0.9")
    state = trainer.optimizer.state
    assert set(state[trainer.model.layers[0].weight]) == {"momentum_buffer"}
    assert set(state[trainer.model.embedding.weight]) == {"step", "exp_avg", "exp_avg_sq"}


def test_the_modules_that_are_named_are_those_of_muon(tmp_path):
    model = train(tmp_path, optim="muon", optim_target_modules=["layers.0"])
    groups = model.optimizer.param_groups
    assert [[tuple(p.shape) for p in group["params"]] for group in groups if group["projects"]] == [[(64, 64)]]


def replica(folder):
    """Train as one of two replicas, and return the weights."""
    return weights(train(folder, optim="muon", strategy="ddp")).tolist()


def test_replicas_stay_equal(tmp_path):
    first, second = run_ranks(replica, 2, str(tmp_path), timeout_s=180)
    assert first == second


def test_divided_matrices_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"is a DTensor.*Muon needs whole matrices; train with replicas"):
        run_ranks(train_in_shards, 2, str(tmp_path), {"optim": "muon"}, timeout_s=120)
