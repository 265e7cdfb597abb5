"""Optimizers and schedules that are given must belong together and to the model; groups may be added later."""

import copy

import pytest
import torch
from small_models import Classifier
from torch.optim.lr_scheduler import StepLR

from tr_core import TrainerCallback, get_scheduler


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.5)


def test_a_schedule_without_its_optimizer_is_refused(make_trainer, model):
    with pytest.raises(ValueError, match=r"given a schedule \(StepLR\) without the optimizer.*pass both"):
        make_trainer(optimizers=(None, StepLR(sgd(model), 1)))


def test_a_schedule_of_another_optimizer_is_refused(make_trainer, model):
    with pytest.raises(ValueError, match=r"the schedule that was given \(StepLR\) sets the rates of another optimizer"):
        make_trainer(optimizers=(sgd(model), StepLR(sgd(model), 1)))


def test_an_optimizer_of_another_model_is_refused(make_trainer):
    with pytest.raises(ValueError, match=r"no parameter of the optimizer that was given \(SGD\) is one of the model's"):
        make_trainer(optimizers=(sgd(Classifier()), None))


def test_an_optimizer_of_a_part_of_the_model_and_of_a_loss_is_taken(make_trainer, model):
    centres = torch.nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.SGD([centres, *model.layers[0].parameters()], lr=0.5)
    make_trainer(8, optimizers=(optimizer, None)).train()


def test_a_schedule_of_the_optimizer_within_a_wrapper_is_taken(make_trainer, model):
    class Wrapper(torch.optim.SGD):
        def step(self, closure=None):
            return inner.step(closure)

    inner = sgd(model)
    outer = Wrapper(model.parameters(), lr=0.5)
    outer.param_groups = inner.param_groups
    trainer = make_trainer(8, optimizers=(outer, StepLR(inner, 1, gamma=0.5)))
    trainer.train()
    assert [entry["learning_rate"] for entry in trainer.state.log_history[:2]] == [0.5, 0.25]


def test_a_group_added_in_a_run_follows_the_schedule(make_trainer, model):
    class Adds(TrainerCallback):
        def on_step_end(self, args, state, control, optimizer, **kwargs):
            if state.global_step == 1:
                optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(2))], "lr": 0.8})
            rates.append([group["lr"] for group in optimizer.param_groups])

    rates = []
    make_trainer(16, optimizers=(sgd(model), None), callbacks=[Adds()]).train()
    assert rates == [[0.375, 0.8], [0.25, 0.4], [0.125, 0.2], [0.0, 0.0]]


def test_a_group_of_one_optimizer_is_not_taken_in_by_the_schedule_of_a_copy(model):
    optimizer = sgd(model)
    schedule = get_scheduler("linear", optimizer, num_training_steps=4)
    copy.deepcopy(optimizer).add_param_group({"params": [torch.zeros(1, requires_grad=True)]})
    assert len(schedule.base_lrs) == 1
