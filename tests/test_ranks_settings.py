"""Settings of several ranks that change how a step is made, and not what it computes."""

import pytest
import torch
from shared.data import rows
from torch import nn

from tr_core import Trainer, TrainingArguments
from tr_dist.testing import run_ranks


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(8, 16)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(3))
        self.last = nn.Linear(16, 3)

    def forward(self, x, labels=None):
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        logits = self.last(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def train(folder, options):
    """Run in every rank; returns losses, weights and what else the tests compare."""
    args = TrainingArguments(
        output_dir=folder,
        learning_rate=1e-2,
        logging_steps=1,
        disable_tqdm=True,
        log_level="error",
        use_cpu=True,
        optim="sgd",
        save_strategy="no",
        **{"num_train_epochs": 1, "per_device_train_batch_size": 4, **options},
    )
    trainer = Trainer(Network(), args, train_dataset=rows(48), eval_dataset=rows(10))
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    weights = {name: value.detach().clone() for name, value in trainer.model.state_dict().items()}
    result = losses, weights, (args.train_batch_size, args.eval_batch_size), trainer.evaluate()["eval_loss"]
    trainer.strategy.close()
    return result


def assert_same(one, other, tolerance):
    assert one[0] == pytest.approx(other[0], rel=tolerance, abs=tolerance)
    assert list(one[1]) == list(other[1])
    for name, mine in one[1].items():
        torch.testing.assert_close(mine, other[1][name], rtol=tolerance, atol=tolerance)
    assert one[3] == pytest.approx(other[3], rel=tolerance)


ACCUMULATED = {"gradient_accumulation_steps": 3}
# Averaged after every micro-batch, gradients are added in another order.
SETTINGS = {
    "each batch synchronised": (
        ACCUMULATED,
        {**ACCUMULATED, "accelerator_config": {"gradient_accumulation_kwargs": {"sync_each_batch": True}}},
        2e-6,
    ),
    "batches split": (
        {},
        {
            "per_device_train_batch_size": 8,
            "per_device_eval_batch_size": 16,
            "accelerator_config": {"split_batches": True},
        },
        0.0,
    ),
    "compiled": ({}, {"torch_compile_backend": "aot_eager"}, 2e-6),
    "activations computed again": (ACCUMULATED, {**ACCUMULATED, "activation_checkpointing": True}, 0.0),
}


@pytest.mark.parametrize("setting", [pytest.param(s, marks=[pytest.mark.slow] * (s == "compiled")) for s in SETTINGS])
def test_two_ranks_compute_the_same_with_a_setting_as_without(tmp_path, setting):
    plain, changed, tolerance = SETTINGS[setting]
    expected = run_ranks(train, 2, str(tmp_path / "a"), plain, timeout_s=240)
    ranks = run_ranks(train, 2, str(tmp_path / "b"), changed, timeout_s=240)
    for rank, other in zip(ranks, expected, strict=True):
        assert_same(rank, other, tolerance)
        assert rank[2] == (4, 8)
    assert_same(ranks[0], ranks[1], 0.0)


def test_a_batch_that_two_ranks_cannot_split_is_refused(tmp_path):
    options = {"per_device_train_batch_size": 5, "accelerator_config": {"split_batches": True}}
    with pytest.raises(Exception, match="per_device_train_batch_size=5 cannot be divided among 2 processes"):
        run_ranks(train, 2, str(tmp_path), options, timeout_s=120)
