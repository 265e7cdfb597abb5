"""An average of the weights in checkpoints on disk, and on several ranks."""

import contextlib

import pytest
import torch
from safetensors.torch import load_file
from shared.callbacks import Stop, StopAt
from shared.data import rows
from torch import nn

from tr_core import Trainer, TrainingArguments
from tr_dist.testing import run_ranks


class Network(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Dropout(dropout), nn.GELU(), nn.Linear(16, 3))
        self.again = nn.Linear(8, 16)
        self.again.weight = self.layers[0].weight
        self.frozen = nn.Linear(3, 3).requires_grad_(False)

    def forward(self, x, labels):
        logits = self.frozen(self.layers(x + self.again(x)[:, :8]))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def train(folder, stop_at=None, resume=None, dropout=0.2, **changes):
    """Run in every rank; returns the weights that are left, the evaluations' losses, and the checkpoints' steps."""
    options = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 4,
        "num_train_epochs": 2,
        "learning_rate": 0.05,
        "ema_decay": 0.9,
        "ema_update_steps": 2,
        "eval_strategy": "steps",
        "eval_steps": 3,
        "save_steps": 2,
        "disable_tqdm": True,
        "log_level": "error",
        "use_cpu": True,
    }
    trainer = Trainer(
        Network(dropout),
        TrainingArguments(**{**options, **changes}),
        train_dataset=rows(40),
        eval_dataset=rows(7),
        callbacks=[StopAt(stop_at)] if stop_at else [],
    )
    with contextlib.suppress(Stop):
        trainer.train(resume_from_checkpoint=resume)
    losses = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    left = {name: tensor.detach().clone() for name, tensor in trainer.model.state_dict().items()}
    trainer.strategy.close()
    return left, losses


def equal(one, other):
    return one[1] == other[1] and all(torch.equal(one[0][name], other[0][name]) for name in one[0])


def test_the_average_is_a_file_of_weights_beside_those_that_train(tmp_path):
    left, _ = train(tmp_path, save_steps=20)
    average, raw = (load_file(tmp_path / "checkpoint-20" / name) for name in ("ema.safetensors", "model.safetensors"))
    assert set(average) == {
        "layers.0.weight", "layers.0.bias", "layers.3.weight", "layers.3.bias", "again.bias",
    }  # fmt: skip
    assert all(torch.equal(average[name], left[name]) for name in average)
    assert not torch.equal(average["layers.0.weight"], raw["layers.0.weight"])


def test_the_best_average_is_loaded_even_from_checkpoints_of_the_weights_alone(tmp_path):
    options = {"load_best_model_at_end": True, "save_strategy": "best", "learning_rate": 1.0}
    left, losses = train(tmp_path / "whole", **options)
    alone, _ = train(tmp_path / "alone", save_only_model=True, **options)
    best = 3 * (losses.index(min(losses)) + 1)
    for folder, weights in (("whole", left), ("alone", alone)):
        average = load_file(tmp_path / folder / f"checkpoint-{min(best, 20)}" / "ema.safetensors")
        assert all(torch.equal(average[name], weights[name]) for name in average)


def test_an_average_cannot_begin_in_a_run_that_had_none(tmp_path):
    train(tmp_path, 5, ema_decay=None, ema_update_steps=1)
    with pytest.raises(
        ValueError, match="checkpoint-4: there is no 'ema' in it.* the options of the run that saved it"
    ):
        train(tmp_path, resume=True)


def test_a_run_without_an_average_goes_on_from_one_that_had_it(tmp_path):
    without = {"ema_decay": None, "ema_update_steps": 1}
    alone, _ = train(tmp_path / "alone", **without)
    train(tmp_path / "other", 5)
    resumed, _ = train(tmp_path / "other", resume=True, **without)
    assert all(torch.equal(alone[name], resumed[name]) for name in alone)


def train_without_dropout(folder, batch_size):
    """Ranks draw apart; and nothing but the order of sums may differ."""
    return train(folder, dropout=0.0, per_device_train_batch_size=batch_size, optim="sgd", save_strategy="no")


def test_two_ranks_have_one_average_and_it_is_that_of_one_process(tmp_path):
    ranks = run_ranks(train_without_dropout, 2, str(tmp_path), 4, timeout_s=120)
    assert equal(ranks[0], ranks[1])
    alone = train_without_dropout(str(tmp_path), 8)
    for name, tensor in alone[0].items():
        torch.testing.assert_close(ranks[0][0][name], tensor, rtol=1e-5, atol=1e-6)


def test_two_ranks_resume_with_the_same_average_bit_for_bit(tmp_path):
    alone = run_ranks(train, 2, str(tmp_path / "alone"), timeout_s=120)
    run_ranks(train, 2, str(tmp_path / "stopped"), 7, timeout_s=120)
    resumed = run_ranks(train, 2, str(tmp_path / "stopped"), None, True, timeout_s=120)
    assert equal(resumed[0], alone[0])
    assert equal(resumed[1], resumed[0])
