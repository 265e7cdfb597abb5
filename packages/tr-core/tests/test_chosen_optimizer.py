"""Optimizers and schedules that a user assigns or passes train, and gradients are those of the model as it is."""

import copy

import pytest
import torch
from support.data import samples, stack
from support.models import Classifier
from support.runs import assert_same_weights, log_of, train_by_hand
from torch import nn
from torch.optim.lr_scheduler import StepLR

from tr_core import Trainer, TrainerCallback, get_scheduler


@pytest.fixture
def in_order(make_trainer):
    def build(**changes):
        options = {"train_sampling_strategy": "sequential", "lr_scheduler_type": "constant", "learning_rate": 0.1}
        return make_trainer(16, **{**options, **changes})

    return build


@pytest.fixture
def twin():
    torch.manual_seed(0)
    return Classifier()  # as the fixture `model`


def test_an_assigned_optimizer_trains(in_order, twin):
    trainer = in_order()
    trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.5)
    trainer.train()
    train_by_hand(twin, torch.optim.SGD(twin.parameters(), lr=0.5), samples(16))
    assert_same_weights(trainer.model, twin)


def test_an_assigned_schedule_sets_the_rates(in_order, twin):
    trainer = in_order()
    trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.5)
    trainer.lr_scheduler = torch.optim.lr_scheduler.ExponentialLR(trainer.optimizer, 0.5)
    trainer.train()
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.5)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    train_by_hand(twin, optimizer, samples(16), schedule)
    assert_same_weights(trainer.model, twin)
    assert log_of(trainer, "learning_rate") == [0.5, 0.25, 0.125, 0.0625]


def test_groups_edited_after_create_optimizer_train_as_edited(in_order, twin):
    trainer = in_order(optim="sgd")
    trainer.create_optimizer()
    trainer.optimizer.param_groups[1]["lr"] = 0.0  # biases
    trainer.train()
    biases = [p for name, p in twin.named_parameters() if name.endswith("bias")]
    others = [p for name, p in twin.named_parameters() if not name.endswith("bias")]
    optimizer = torch.optim.SGD([{"params": others, "lr": 0.1}, {"params": biases, "lr": 0.0}], lr=0.1)
    train_by_hand(twin, optimizer, samples(16))
    assert_same_weights(trainer.model, twin)


def test_an_optimizer_and_a_schedule_built_by_hand_are_used(in_order):
    trainer = in_order(lr_scheduler_type="linear")
    trainer.create_optimizer_and_scheduler(num_training_steps=8)
    built = trainer.optimizer, trainer.lr_scheduler
    trainer.train()
    assert (trainer.optimizer, trainer.lr_scheduler) == built
    rates = log_of(trainer, "learning_rate")
    assert rates == pytest.approx([0.1, 0.0875, 0.075, 0.0625])


def test_an_optimizer_that_was_built_is_built_again_where_the_arguments_changed_since(in_order):
    trainer = in_order()
    assert trainer.get_learning_rates() == [0.1, 0.1]
    trainer.args.learning_rate = 0.2
    trainer.train()
    assert trainer.state.log_history[0]["learning_rate"] == 0.2


def test_an_optimizer_that_was_built_is_built_again_where_the_model_changed_since(in_order):
    trainer = in_order()
    trainer.create_optimizer()
    trainer.model.layers[3] = nn.Linear(16, 3)
    before = trainer.model.layers[3].weight.detach().clone()
    trainer.train()
    assert not torch.equal(trainer.model.layers[3].weight, before)


def test_edited_groups_and_changed_arguments_are_refused_together(in_order):
    trainer = in_order()
    trainer.create_optimizer().param_groups[0]["lr"] = 1.0
    trainer.args.weight_decay = 0.1
    with pytest.raises(ValueError, match=r"weight_decay changed after create_optimizer\(\) had built AdamW"):
        trainer.train()


def test_a_second_run_builds_a_new_optimizer_in_place_of_the_one_that_was_built(in_order):
    trainer = in_order()
    trainer.train()
    first = trainer.optimizer
    trainer.train()
    assert trainer.optimizer is not first
    assert {int(state["step"]) for state in trainer.optimizer.state.values()} == {4}


def test_groups_edited_between_two_runs_are_refused(in_order):
    trainer = in_order()
    trainer.train()
    trainer.optimizer.param_groups[0]["lr"] = 0.5
    with pytest.raises(ValueError, match=r"groups of AdamW were edited after the run .* trainer.optimizer = "):
        trainer.train()


def test_an_optimizer_assigned_to_itself_between_two_runs_keeps_its_moments(in_order):
    trainer = in_order()
    trainer.train()
    trainer.optimizer = trainer.optimizer
    trainer.train()
    assert {int(state["step"]) for state in trainer.optimizer.state.values()} == {8}


def test_an_assigned_optimizer_trains_in_every_run_until_none_is_assigned(in_order):
    trainer = in_order()
    own = trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.5)
    for _ in range(2):
        trainer.train()
        assert trainer.optimizer is own
    trainer.optimizer = None
    trainer.train()
    assert isinstance(trainer.optimizer, torch.optim.AdamW)


def test_an_optimizer_of_another_model_is_refused(in_order):
    trainer = in_order()
    trainer.optimizer = torch.optim.SGD(Classifier().parameters(), lr=0.5)
    with pytest.raises(ValueError, match=r"no parameter of the optimizer that was given \(SGD\) is one of the model"):
        trainer.train()


def test_a_schedule_of_another_optimizer_is_refused(in_order):
    trainer = in_order()
    other = torch.optim.SGD(trainer.model.parameters(), lr=0.5)
    trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.5)
    trainer.lr_scheduler = torch.optim.lr_scheduler.ConstantLR(other)
    with pytest.raises(ValueError, match=r"\(ConstantLR\) sets the rates of another optimizer"):
        trainer.train()


def test_an_override_that_builds_the_optimizer_builds_one_for_every_run(in_order):
    class Own(Trainer):
        def create_optimizer(self, model=None):
            if self.optimizer is None:
                self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5)
            return self.optimizer

    trainer = in_order(trainer_class=Own)
    trainer.train()
    first = trainer.optimizer
    assert isinstance(first, torch.optim.SGD)
    trainer.train()
    assert isinstance(trainer.optimizer, torch.optim.SGD)
    assert trainer.optimizer is not first


# Given at construction


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.5)


def test_a_schedule_without_its_optimizer_is_refused(make_trainer, model):
    with pytest.raises(ValueError, match=r"given a schedule \(StepLR\) without the optimizer.*pass both"):
        make_trainer(optimizers=(None, StepLR(sgd(model), 1)))


def test_a_schedule_of_another_optimizer_is_refused_at_construction(make_trainer, model):
    with pytest.raises(ValueError, match=r"the schedule that was given \(StepLR\) sets the rates of another optimizer"):
        make_trainer(optimizers=(sgd(model), StepLR(sgd(model), 1)))


def test_an_optimizer_of_another_model_is_refused_at_construction(make_trainer):
    with pytest.raises(ValueError, match=r"no parameter of the optimizer that was given \(SGD\) is one of the model's"):
        make_trainer(optimizers=(sgd(Classifier()), None))


def test_an_optimizer_of_a_part_of_the_model_and_of_a_loss_is_taken(make_trainer, model):
    centres = torch.nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.SGD([centres, *model.layers[0].parameters()], lr=0.5)
    make_trainer(8, optimizers=(optimizer, None)).train()


def test_a_schedule_of_the_optimizer_within_a_wrapper_is_taken(make_trained, model):
    class Wrapper(torch.optim.SGD):
        def step(self, closure=None):
            return inner.step(closure)

    inner = sgd(model)
    outer = Wrapper(model.parameters(), lr=0.5)
    outer.param_groups = inner.param_groups
    trainer = make_trained(8, optimizers=(outer, StepLR(inner, 1, gamma=0.5)))
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


# The model as it is


OPTIONS = {
    "train_sampling_strategy": "sequential",
    "lr_scheduler_type": "constant",
    "learning_rate": 0.5,
    "optim": "sgd",
    "max_grad_norm": 0.1,
}


def by_hand(model, parameters, rows):
    return train_by_hand(model, torch.optim.SGD(parameters, lr=0.5), rows, max_norm=OPTIONS["max_grad_norm"])


def head(seed=5):
    torch.manual_seed(seed)
    return nn.Linear(16, 3)


def test_gradients_of_parameters_outside_the_optimizer_do_not_add_up(make_trainer, twin):
    trainer = make_trainer(16, **OPTIONS)
    trainer.optimizer = torch.optim.SGD(trainer.model.layers[3].parameters(), lr=0.5)
    trainer.train()
    expected = by_hand(twin, twin.layers[3].parameters(), samples(16))
    assert log_of(trainer, "grad_norm") == pytest.approx(expected, rel=1e-5)
    assert_same_weights(trainer.model, twin)
    assert all(parameter.grad is None for parameter in trainer.model.parameters())


def test_gradients_that_are_there_when_training_begins_are_cleared(make_trainer, twin):
    trainer = make_trainer(16, **OPTIONS)
    trainer.model(torch.ones(4, 8), torch.zeros(4, dtype=torch.int64))["loss"].backward()
    trainer.train()
    assert log_of(trainer, "grad_norm") == pytest.approx(by_hand(twin, twin.parameters(), samples(16)), rel=1e-5)


def replace_head(model):
    model.layers[3] = head()


def replace_parameter(model):
    model.layers[3].weight = nn.Parameter(torch.ones(3, 16))


@pytest.mark.parametrize("replace", [replace_head, replace_parameter])
def test_a_part_replaced_after_an_evaluation_is_trained_measured_and_clipped(make_trainer, twin, replace):
    trainer = make_trainer(16, eval_dataset=samples(4), **OPTIONS)
    trainer.evaluate()
    replace(trainer.model)
    replace(twin)
    trainer.train()
    assert log_of(trainer, "grad_norm") == pytest.approx(by_hand(twin, twin.parameters(), samples(16)), rel=1e-5)
    assert_same_weights(trainer.model, twin)


def test_a_model_assigned_after_an_evaluation_is_trained_measured_clipped_and_evaluated(make_trainer):
    trainer = make_trainer(16, eval_dataset=samples(4), **OPTIONS)
    trainer.evaluate()
    torch.manual_seed(7)
    trainer.model = Classifier()
    torch.manual_seed(7)
    twin = Classifier()
    assert trainer.evaluate()["eval_loss"] == pytest.approx(evaluated(twin))
    trainer.train()
    assert log_of(trainer, "grad_norm") == pytest.approx(by_hand(twin, twin.parameters(), samples(16)), rel=1e-5)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(evaluated(twin), rel=1e-5)


def evaluated(model):
    rows = samples(4)
    with torch.no_grad():
        return model(**stack(rows))["loss"].item()


class InTheMiddle(TrainerCallback):
    def __init__(self, act):
        self.act = act

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 2:
            self.act(kwargs["model"], kwargs["optimizer"])


def test_a_head_replaced_in_a_run_is_refused_where_the_optimizer_does_not_hold_it(make_trainer):
    def act(model, optimizer):
        model.layers[3] = head()

    trainer = make_trainer(16, callbacks=[InTheMiddle(act)], **OPTIONS)
    with pytest.raises(ValueError, match=r"no group of the optimizer holds: \['layers.3.weight', 'layers.3.bias'\]"):
        trainer.train()


def test_a_head_replaced_in_a_run_and_given_to_the_optimizer_is_trained_measured_and_clipped(make_trained, twin):
    def act(model, optimizer):
        model.layers[3] = head()
        optimizer.add_param_group({"params": list(model.layers[3].parameters())})

    trainer = make_trained(16, callbacks=[InTheMiddle(act)], **OPTIONS)
    first = by_hand(twin, twin.parameters(), samples(16)[:8])
    twin.layers[3] = head()
    assert log_of(trainer, "grad_norm") == pytest.approx(
        first + by_hand(twin, twin.parameters(), samples(16)[8:]), rel=1e-5
    )
    assert_same_weights(trainer.model, twin)


def test_a_layer_unfrozen_in_a_run_is_refused_where_the_optimizer_does_not_hold_it(make_trainer, model):
    model.layers[0].requires_grad_(False)
    trainer = make_trainer(
        16, callbacks=[InTheMiddle(lambda model, optimizer: model.layers[0].requires_grad_(True))], **OPTIONS
    )
    with pytest.raises(ValueError, match="the parameter layers.0.weight was unfrozen during training"):
        trainer.train()


def test_modules_are_watched_during_a_run_only(make_trainer):
    from torch.nn.modules import module

    seen = []
    count = lambda *_: seen.append(len(module._global_module_registration_hooks))  # noqa: E731
    trainer = make_trainer(16, callbacks=[InTheMiddle(count)], **OPTIONS)
    before = len(module._global_module_registration_hooks)
    trainer.train()
    assert (seen, len(module._global_module_registration_hooks)) == ([before + 1], before)
