"""Optimizers, decay, clipping, schedules and precision."""

import parity_data as data
import parity_models as models
import pytest
import torch
from parity_harness import OURS, REFERENCE, Scenario, assert_same, build, make_model, warnings_of
from torch.nn.functional import cross_entropy


@pytest.mark.parametrize("name", ["adamw_torch", "adamw_torch_fused", "sgd", "adagrad", "rmsprop"])
def test_each_optimizer_of_torch_makes_the_same_steps(parity, name):
    parity(models.Mlp, data.classes(), optim=name, weight_decay=0.1)


def test_adam_takes_its_settings_in_the_same_way(parity):
    parity(models.Mlp, data.classes(), adam_beta1=0.7, adam_beta2=0.9, adam_epsilon=1e-3)


@pytest.mark.parametrize(
    ("name", "settings"),
    [("sgd", "momentum=0.9, nesterov=True"), ("rmsprop", "alpha=0.9, momentum=0.5")],
)
def test_the_momentum_of_optim_args_is_the_same(parity, name, settings):
    parity(models.Mlp, data.classes(), optim=name, optim_args=settings)


@pytest.mark.parametrize("model", [models.Mlp, models.bert_classifier, models.llama])
def test_weight_decay_spares_the_same_parameters(parity, model):
    samples = {models.Mlp: data.classes, models.llama: data.tokens}.get(model, data.sentences)()
    _, ours = parity(model, samples, weight_decay=0.5, learning_rate=0.01, num_train_epochs=1)
    decayed, spared = ours.trainer.optimizer.param_groups
    assert decayed["weight_decay"] == 0.5
    assert spared["weight_decay"] == 0.0
    assert len(spared["params"]) > 0


@pytest.mark.parametrize("max_grad_norm", [0.0, 1e-3, 1.0, 1e6])
def test_clipping_is_the_same(parity, max_grad_norm):
    parity(models.Mlp, data.classes(), max_grad_norm=max_grad_norm, optim="sgd")


def test_clipping_acts_on_the_accumulated_gradient_in_both(parity):
    parity(models.Mlp, data.classes(), max_grad_norm=0.05, optim="sgd", gradient_accumulation_steps=2)


@pytest.mark.parametrize("warmup", [{}, {"warmup_steps": 3}, {"warmup_steps": 0.25}])
@pytest.mark.parametrize("schedule", ["linear", "cosine", "constant", "constant_with_warmup"])
def test_each_schedule_gives_the_same_rates(parity, schedule, warmup):
    parity(models.Linear, data.regression(), lr_scheduler_type=schedule, **warmup)


def test_settings_of_a_schedule_are_the_same(parity):
    parity(models.Linear, data.regression(), lr_scheduler_type="cosine", lr_scheduler_kwargs={"num_cycles": 1.5})


def test_an_optimizer_and_a_schedule_that_are_given_are_used_in_the_same_way(tmp_path):
    outcomes = []
    for side in (REFERENCE, OURS):
        scenario = Scenario(models.Mlp, data.classes())
        model = make_model(scenario)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3)
        scenario.options = {"optimizers": (optimizer, schedule)}
        outcome = build(side, scenario, tmp_path / side.name, model)
        with warnings_of(side):
            outcome.output = outcome.trainer.train()
        outcomes.append(outcome)
    assert_same(*outcomes)


@pytest.mark.parametrize("model", [models.Mlp, models.llama])
def test_bf16_is_the_same(parity, model):
    samples = data.classes() if model is models.Mlp else data.tokens()
    evaluation = data.classes(9, seed=8) if model is models.Mlp else data.tokens(9, seed=8, masked=False)
    parity(model, samples, evaluation, bf16=True, learning_rate=0.01, eval_strategy="epoch")


def test_bf16_with_accumulation_and_clipping_is_the_same(parity):
    parity(models.Mlp, data.classes(), bf16=True, gradient_accumulation_steps=2, max_grad_norm=0.1)


def test_bf16_with_a_loss_function_is_the_same(parity):
    def summed(outputs, labels, num_items_in_batch=None):
        return cross_entropy(outputs["logits"], labels, reduction="sum") / num_items_in_batch

    parity(models.Mlp, data.classes(), bf16=True, options={"compute_loss_func": summed}, gradient_accumulation_steps=2)
