"""Compute activations again, also in units that are in shards: the gradients are those of one process without."""

import pytest
import torch
from test_numbers import Rows
from torch import nn
from variants import FARTHER, TOLERANCE, run_on, shared

from tr_core import Trainer, TrainingArguments
from tr_dist.testing import run_ranks


class Layer(nn.Module):
    forwards = 0

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x):
        Layer.forwards += 1
        return x + torch.tanh(self.inner(x))


class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([Layer(), Layer(), Layer()])
        self.head = nn.Linear(8, 3)

    def forward(self, x, labels):
        for layer in self.layers:
            x = layer(x)
        return {"loss": nn.functional.cross_entropy(self.head(x), labels)}


def train(folder, options):
    """Return losses, norms, weights, and how many forwards of layers a step made."""
    rows = [dict(row, labels=row["labels"].clamp(min=0)) for row in Rows(24).rows]
    args = TrainingArguments(
        output_dir=folder, save_strategy="no", max_steps=4, logging_steps=1, learning_rate=1e-2, optim="sgd",
        disable_tqdm=True, log_level="error", **{"use_cpu": True, **options},
    )  # fmt: skip
    Layer.forwards = 0
    trainer = Trainer(Deep(), args, train_dataset=rows)
    trainer.train()
    history = [(e["loss"], e["grad_norm"]) for e in trainer.state.log_history if "grad_norm" in e]
    weights = {k: v.detach().cpu().clone() for k, v in trainer.strategy.full_state_dict(trainer.model_wrapped).items()}
    trainer.strategy.close()
    return history, weights, Layer.forwards / 4


@pytest.mark.row("recompute")
@pytest.mark.column("fsdp")
@pytest.mark.parametrize("sharding", ["full_shard", "shard_grad_op"])
def test_activations_of_units_are_computed_again(tmp_path, sharding):
    alone = train(str(tmp_path / "1"), {"per_device_train_batch_size": 12})
    config = {"transformer_layer_cls_to_wrap": ["Layer"], "activation_checkpointing": True}
    options = {"fsdp": sharding, "fsdp_config": config, "per_device_train_batch_size": 6}
    check(run_ranks(train, 2, str(tmp_path / "2"), options, timeout_s=120), alone)


@pytest.mark.row("recompute")
def test_activations_are_computed_again(tmp_path, variant):
    alone = train(str(tmp_path / "1"), {"per_device_train_batch_size": 12})
    options = {**shared(variant, 12, 2), "activation_checkpointing": True}
    if "transformer_layer_cls_to_wrap" in options.get("fsdp_config", {}):
        options["fsdp_config"] = {"transformer_layer_cls_to_wrap": ["Layer"]}
    if "tp_plan" in options:
        options["tp_plan"] = {"layers.*.inner": "rowwise_split_input"}
    ranks = run_on(variant, train, 2, str(tmp_path / "2"), options)
    check(ranks, alone, TOLERANCE * FARTHER.get(variant, 1))


def check(ranks, alone, tolerance=TOLERANCE):
    assert alone[2] == 3
    for rank in ranks:
        torch.testing.assert_close(torch.tensor(rank[0]), torch.tensor(alone[0]), rtol=tolerance, atol=tolerance)
        assert rank[2] > 5
    for name, value in alone[1].items():
        torch.testing.assert_close(ranks[0][1][name], value, rtol=tolerance, atol=tolerance)
