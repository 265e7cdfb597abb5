"""Functions and schedules assigned in the middle of a run act from the next step, whatever happens in between."""

import pytest
import torch
from memory_checkpointer import MemoryCheckpointer
from small_models import samples
from torch import nn

from tr_core import TrainerCallback


class At(TrainerCallback):
    def __init__(self, step, act):
        self.step, self.act = step, act

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            self.act()


def counted_sum(outputs, labels, num_items_in_batch):
    return 10 * nn.functional.cross_entropy(outputs["logits"], labels, reduction="sum") / num_items_in_batch


@pytest.mark.parametrize("evaluates", [False, True], ids=["alone", "with an evaluation in that step"])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_loss_function_that_is_counted_is_given_the_count_from_the_next_step(make_trainer, evaluates, accumulation):
    options = {
        "train_sampling_strategy": "sequential",
        "learning_rate": 0.0,
        "gradient_accumulation_steps": accumulation,
    }
    if evaluates:
        options |= {"eval_dataset": samples(4), "eval_strategy": "steps", "eval_steps": 1}
    trainer = make_trainer(16, per_device_train_batch_size=4 // accumulation, **options)
    trainer.add_callback(At(2, lambda: setattr(trainer, "compute_loss_func", counted_sum)))
    trainer.train()
    logits = trainer.model(torch.stack([row["x"] for row in samples(16)]))["logits"]
    labels = torch.stack([row["labels"] for row in samples(16)])
    for step, loss in enumerate(entry["loss"] for entry in trainer.state.log_history if "loss" in entry):
        part = slice(4 * step, 4 * step + 4)
        expected = nn.functional.cross_entropy(logits[part], labels[part]).item() * (1 if step < 2 else 10)
        assert loss == pytest.approx(expected, rel=1e-5)


def test_a_run_resumed_after_a_group_was_added_in_it_says_what_it_needs(make_trainer, model, tmp_path):
    extra = nn.Parameter(torch.zeros(3))
    keeper = MemoryCheckpointer(tmp_path)
    options = {"checkpointer": keeper, "save_strategy": "steps", "save_steps": 3, "max_steps": 4}
    trainer = make_trainer(16, **options)
    trainer.add_callback(At(2, lambda: trainer.optimizer.add_param_group({"params": [extra]})))
    trainer.train()
    with pytest.raises(
        ValueError, match="its optimizer had 3 parameter groups, and this run's has 2: groups that were"
    ):
        make_trainer(16, **options).train(resume_from_checkpoint=True)
    resumed = make_trainer(16, **options)
    resumed.create_optimizer().add_param_group({"params": [extra]})
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 4


def test_a_schedule_assigned_in_a_run_is_what_its_checkpoints_are_compared_with(make_trainer, tmp_path):
    def constant(optimizer):
        return torch.optim.lr_scheduler.ConstantLR(optimizer, factor=0.5, total_iters=100)

    keeper = MemoryCheckpointer(tmp_path)
    options = {"checkpointer": keeper, "save_strategy": "steps", "save_steps": 3, "learning_rate": 0.1, "optim": "sgd"}
    trainer = make_trainer(16, **options)
    trainer.add_callback(At(2, lambda: setattr(trainer, "lr_scheduler", constant(trainer.optimizer))))
    trainer.train()
    rates = [entry["learning_rate"] for entry in trainer.state.log_history if "loss" in entry]
    assert rates == pytest.approx([0.1, 0.075, 0.025, 0.025])
    resumed = make_trainer(16, **options)
    resumed.lr_scheduler = constant(resumed.create_optimizer())
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.log_history[-2]["learning_rate"] == pytest.approx(0.025)
