"""Overrides of the hooks around a step on two ranks: counts over both, and losses of both in a log of one's own."""

import pytest
import torch
from shared.data import rows
from torch import nn

from tr_core import Trainer, TrainingArguments
from tr_dist.testing import run_ranks


class Counted(nn.Module):
    """Divides a summed loss by the count that it is given."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.LazyLinear(3)

    def forward(self, x, labels=None, num_items_in_batch=None):
        logits = self.layer(x)
        loss = nn.functional.cross_entropy(logits, labels, reduction="sum")
        return {"loss": loss / (len(labels) if num_items_in_batch is None else num_items_in_batch), "logits": logits}


class Takes(Trainer):
    def get_batch_samples(self, epoch_iterator, num_batches, device):
        batches, count = super().get_batch_samples(epoch_iterator, num_batches, device)
        self.counts.append(int(count))
        return batches, count


class Logs(Trainer):
    def _maybe_log_save_evaluate(self, tr_loss, grad_norm, model, trial, epoch, keys, start_time, learning_rate=None):
        if self.control.should_log and self.state.global_step > self._globalstep_last_logged:
            total = self._nested_gather(tr_loss).mean().item()
            tr_loss -= tr_loss
            logs = {"loss": total / (self.state.global_step - self._globalstep_last_logged)}
            self._total_loss_scalar += total
            self._globalstep_last_logged = self.state.global_step
            self.store_flos()
            self.log(logs, start_time)


KINDS = {kind.__name__: kind for kind in (Trainer, Takes, Logs)}


def train(folder, kind):
    data = rows(21)  # the last micro-batch has one sample, so that one rank has a filler
    model = Counted()
    model.layer(data[0]["x"][None])
    args = TrainingArguments(
        f"{folder}/{kind}",
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        num_train_epochs=2,
        save_strategy="no",
        logging_steps=2,
        disable_tqdm=True,
        log_level="error",
        use_cpu=True,
        ddp_timeout=60,
        strategy="ddp",
    )
    trainer = KINDS[kind](model, args, train_dataset=data)
    trainer.__dict__["counts"] = []
    result = trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    weights = [p.detach().clone() for p in trainer.model.parameters()]
    trainer.strategy.close()
    return losses, result.training_loss, weights, trainer.counts


@pytest.mark.parametrize("kind", ["Takes", "Logs"])
def test_an_override_changes_no_number_of_two_ranks(kind, tmp_path):
    usual, own = (run_ranks(train, 2, str(tmp_path), name, timeout_s=120) for name in ("Trainer", kind))
    for (losses, mean, weights, _), (own_losses, own_mean, own_weights, counts) in zip(usual, own, strict=True):
        assert own_losses == pytest.approx(losses, rel=1e-6)
        assert own_mean == pytest.approx(mean, rel=1e-6)
        assert all(torch.equal(*pair) for pair in zip(weights, own_weights, strict=True))
        assert counts == ([8, 8, 5] * 2 if kind == "Takes" else [])
