"""Whether `compute_loss` divides by the accumulation itself is seen by all ranks together."""

import pytest
import torch
from shared.data import rows
from torch import nn

from tr_core import Trainer, TrainingArguments
from tr_dist.testing import run_ranks


class Network(nn.Module):
    """Its loss needs no labels."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(8, 3)

    def forward(self, x, labels=None):
        return {"loss": self.layer(x).square().mean()}


class Mean(Trainer):
    """Its loss is a mean."""

    def divisor(self):
        return 1

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return model(**inputs)["loss"] / self.divisor()


class Divides(Mean):
    def divisor(self):
        return self.current_gradient_accumulation_steps


class ReadsOnOneRank(Mean):
    def divisor(self):
        return 4 if self.strategy.rank == 0 else self.current_gradient_accumulation_steps


KINDS = {kind.__name__: kind for kind in (Mean, Divides, ReadsOnOneRank)}


def train(folder, kind):
    args = TrainingArguments(
        folder,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=4,
        num_train_epochs=1,
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
        log_level="error",
        use_cpu=True,
        ddp_timeout=30,
        strategy="ddp",
    )
    trainer = KINDS[kind](Network(), args, train_dataset=[{"x": row["x"]} for row in rows(16)])
    try:
        trainer.train()
    except ValueError as error:
        trainer.strategy.close(failed=True)
        return str(error)
    trainer.strategy.close()
    weights = [value.detach().tolist() for value in trainer.model.parameters()]
    return weights, [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_a_loss_that_is_divided_already_is_that_of_a_mean_on_several_ranks(tmp_path):
    expected = run_ranks(train, 2, str(tmp_path), "Mean", timeout_s=120)
    found = run_ranks(train, 2, str(tmp_path), "Divides", timeout_s=120)
    for (weights, losses), (expected_weights, expected_losses) in zip(found, expected, strict=True):
        assert losses == pytest.approx(expected_losses, rel=1e-6)
        torch.testing.assert_close(
            [torch.tensor(each) for each in weights], [torch.tensor(each) for each in expected_weights]
        )


def test_ranks_of_which_one_reads_the_accumulation_say_so_together(tmp_path):
    for text in run_ranks(train, 2, str(tmp_path), "ReadsOnOneRank", timeout_s=120):
        assert "whether it divides the loss by that cannot be seen" in text
