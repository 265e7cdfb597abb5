"""Gradients and norms are those of the model as it is: parts may be replaced, left out of an optimizer, or unfrozen."""

import pytest
import torch
from support.data import samples, stack
from support.models import Classifier
from support.runs import assert_same_weights, log_of, train_by_hand
from torch import nn

from tr_core import TrainerCallback

OPTIONS = {
    "train_sampling_strategy": "sequential",
    "lr_scheduler_type": "constant",
    "learning_rate": 0.5,
    "optim": "sgd",
    "max_grad_norm": 0.1,
}


def by_hand(model, parameters, rows):
    return train_by_hand(model, torch.optim.SGD(parameters, lr=0.5), rows, max_norm=OPTIONS["max_grad_norm"])


@pytest.fixture
def twin():
    torch.manual_seed(0)
    return Classifier()  # as the fixture `model`


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


def test_a_head_replaced_after_an_evaluation_is_trained_measured_and_clipped(make_trainer, twin):
    trainer = make_trainer(16, eval_dataset=samples(4), **OPTIONS)
    trainer.evaluate()
    trainer.model.layers[3], twin.layers[3] = head(), head()
    trainer.train()
    assert log_of(trainer, "grad_norm") == pytest.approx(by_hand(twin, twin.parameters(), samples(16)), rel=1e-5)
    assert_same_weights(trainer.model, twin)


def test_a_parameter_replaced_after_an_evaluation_is_trained_measured_and_clipped(make_trainer, twin):
    trainer = make_trainer(16, eval_dataset=samples(4), **OPTIONS)
    trainer.evaluate()
    for model in (trainer.model, twin):
        model.layers[3].weight = nn.Parameter(torch.ones(3, 16))
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


def test_a_layer_frozen_in_a_run_stays_as_it_is(make_trained):
    kept = []

    def act(model, optimizer):
        model.layers[0].requires_grad_(False)
        kept.append(model.layers[0].weight.detach().clone())

    trainer = make_trained(16, callbacks=[InTheMiddle(act)], **OPTIONS)
    assert torch.equal(trainer.model.layers[0].weight, kept[0])


def test_modules_are_watched_during_a_run_only(make_trainer):
    from torch.nn.modules import module

    seen = []
    count = lambda *_: seen.append(len(module._global_module_registration_hooks))  # noqa: E731
    trainer = make_trainer(16, callbacks=[InTheMiddle(count)], **OPTIONS)
    before = len(module._global_module_registration_hooks)
    trainer.train()
    assert (seen, len(module._global_module_registration_hooks)) == ([before + 1], before)
