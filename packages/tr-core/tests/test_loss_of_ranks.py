"""What a rank's share of a step's loss is, where another rank holds other numbers of targets."""

import pytest
import torch
from support.data import samples
from support.models import CountedSum, IgnoresCount
from torch import nn

from tr_core import SingleDevice, Trainer, TrainerCallback


class OneOfTwo(SingleDevice):
    """Answers like the first of two ranks, of which the other one has three times as many targets."""

    world_size = 2

    def __init__(self):
        super().__init__("cpu")

    def sum(self, tensor):
        return 4 * tensor

    def gather_objects(self, value):
        return [value, value]


class KeepGradient(TrainerCallback):
    def on_pre_optimizer_step(self, args, state, control, model, **kwargs):
        self.gradient = torch.cat([p.grad.flatten() for p in model.parameters()])


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize(
    ("kind", "over_ranks", "share"),
    [
        (CountedSum, True, 2 / 4),  # a quarter of all targets; gradients are averaged over two ranks
        (CountedSum, False, 1.0),  # a mean over this rank's targets
        (IgnoresCount, True, 1.0),
        (IgnoresCount, False, 1.0),
    ],
)
def test_a_rank_trains_its_share_of_the_step(make_args, kind, over_ranks, share, accumulation):
    torch.manual_seed(0)
    model, keep = kind(), KeepGradient()
    data, size = samples(16), 8 // accumulation
    args = make_args(
        max_steps=1,
        per_device_train_batch_size=size,
        gradient_accumulation_steps=accumulation,
        average_tokens_across_devices=over_ranks,
        max_grad_norm=0.0,
        learning_rate=0.0,
        train_sampling_strategy="sequential",
    )
    Trainer(model, args, train_dataset=data, strategy=OneOfTwo(), callbacks=[keep]).train()

    rows = [row for start in range(0, 16, 2 * size) for row in data[start : start + size]]  # each batch's first half
    inputs, labels = torch.stack([row["x"] for row in rows]), torch.stack([row["labels"] for row in rows])
    model.zero_grad()
    nn.functional.cross_entropy(model.layers(inputs), labels).backward()
    expected = share * torch.cat([p.grad.flatten() for p in model.parameters()])
    torch.testing.assert_close(keep.gradient, expected, rtol=1e-5, atol=1e-7)


class InParts(Trainer):
    """Gives a part of its loss beside it, as large as the loss or twice as large."""

    def compute_loss(self, model, inputs, return_outputs=False):
        loss = super().compute_loss(model, inputs)
        return {"loss": loss, "twice": 2 * loss}


class Logged(OneOfTwo):
    """The other rank logs what this one does: a mean over both is what one has."""

    def sum(self, tensor):
        return 2 * tensor


@pytest.mark.parametrize("accumulation", [1, 2])
def test_parts_of_a_loss_are_logged_as_the_loss_is_over_ranks_too(make_args, accumulation):
    torch.manual_seed(0)
    args = make_args(max_steps=2, gradient_accumulation_steps=accumulation, logging_steps=1)
    trainer = InParts(IgnoresCount(), args, train_dataset=samples(32), strategy=Logged())
    trainer.train()
    for entry in trainer.state.log_history[:2]:
        assert entry["twice"] == pytest.approx(2 * entry["loss"], rel=1e-6)
