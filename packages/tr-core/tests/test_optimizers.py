"""Optimizers of torch by their names, with their options and parameter groups."""

import pytest
import torch
from support.models import Classifier
from torch import nn

from tr_core import TrainingArguments, plugins
from tr_core.optim.optimizers import decay_parameter_names, optimizer_factory, optimizer_names, parameter_groups


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.LayerNorm = nn.LayerNorm(4)
        self.q_norm = nn.Linear(2, 2, bias=False)
        self.normal = nn.Linear(2, 2, bias=False)
        self.frozen = nn.Linear(2, 2).requires_grad_(False)


def test_biases_and_scales_of_norms_do_not_decay_and_frozen_parameters_are_left_out():
    block = Block()
    assert decay_parameter_names(block) == ["linear.weight", "normal.weight", "frozen.weight"]
    decayed, rest = parameter_groups(block, 0.1)
    assert ([len(group["params"]) for group in (decayed, rest)], decayed["weight_decay"]) == ([2, 4], 0.1)
    assert rest["weight_decay"] == 0.0


@pytest.mark.parametrize(
    ("name", "kind", "options"),
    [
        ("adamw_torch", torch.optim.AdamW, None),
        ("adamw_torch_fused", torch.optim.AdamW, None),
        ("sgd", torch.optim.SGD, "momentum=0.9, nesterov=true"),
        ("adagrad", torch.optim.Adagrad, "lr_decay=0.1"),
        ("rmsprop", torch.optim.RMSprop, "alpha=0.9"),
    ],
)
def test_torch_optimizers_are_built_by_name_with_their_options(make_trained, name, kind, options):
    trainer = make_trained(8, optim=name, optim_args=options, weight_decay=0.1, adam_beta1=0.8, learning_rate=0.25)
    assert type(trainer.optimizer) is kind
    group = trainer.optimizer.param_groups[0]
    assert (group["initial_lr"], group["weight_decay"]) == (0.25, 0.1)
    if kind is torch.optim.AdamW:
        assert (group["betas"], group["fused"]) == ((0.8, 0.999), True if name.endswith("fused") else None)
    if options:
        key, value = options.split(",")[0].split("=")
        assert group[key] == float(value)


def test_a_device_that_torch_has_no_fused_optimizers_for_gets_plain_ones(tmp_path):
    args = TrainingArguments(output_dir=str(tmp_path), optim="adamw_torch_fused")
    for device, has_fused in (("cpu", True), ("meta", False)):
        _, options = optimizer_factory(args, nn.Linear(2, 1, device=device))
        assert options.get("fused", False) is has_fused


def test_the_names_of_optimizers_are_listed():
    assert {"adamw_torch", "sgd"} <= set(optimizer_names())


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("adamw_anyprecision", "use optim='stable_adamw' with optim_args='kahan_sum=true'.* or optim='adamw_torch'"),
        ("adamw_torch_npu_fused", "Ascend NPUs only.* use optim='adamw_torch'"),
        ("adamw_torch_xla", "on_nonfinite does that; use optim='adamw_torch'"),
        ("galore_torch_adamw_8bit", "never change, and nothing says so.* Use optim='galore_adamw_8bit'"),
    ],
)
def test_a_known_name_that_is_not_offered_says_what_to_use(name, instead):
    with pytest.raises(plugins.PluginError, match=f"there is no optimizer '{name}' (here|any more): .*{instead}"):
        optimizer_factory(args_with(optim=name))


# Optimizers that a package offers


def args_with(**options):
    return TrainingArguments(output_dir="unused", report_to=[], **options)


def test_what_a_package_offers_is_given_the_model_if_it_asks_for_it(monkeypatch):
    def plain(groups, args):
        return groups, args

    def with_model(groups, args, model):
        return groups, args, model

    with_model.needs_model = True
    offered = {"plain": plain, "with_model": with_model}
    monkeypatch.setattr(plugins, "load", lambda group, name, built_in=(): offered[name])
    args, model = args_with(optim="plain"), Classifier()
    assert optimizer_factory(args, model)[0]([1]) == ([1], args)
    args = args_with(optim="with_model")
    assert optimizer_factory(args, model)[0]([1]) == ([1], args, model)
    with pytest.raises(ValueError, match="looks for its parameters in the model; pass it too"):
        optimizer_factory(args)[0]([1])


@pytest.mark.parametrize("name", ["adamw_torch", "plain"])
def test_target_modules_are_refused_where_nothing_takes_them(monkeypatch, name):
    monkeypatch.setattr(plugins, "load", lambda group, name, built_in=(): lambda groups, args: groups)
    args = args_with(optim=name, optim_target_modules=["attn"])
    with pytest.raises(ValueError, match=r"optim_target_modules=\['attn'\] has no effect on optim="):
        optimizer_factory(args, Classifier())


def test_target_modules_reach_what_takes_them(monkeypatch):
    def factory(groups, args, model):
        return args.optim_target_modules

    factory.needs_model = factory.takes_target_modules = True
    monkeypatch.setattr(plugins, "load", lambda group, name, built_in=(): factory)
    args = args_with(optim="low_rank", optim_target_modules="all-linear")
    assert optimizer_factory(args, Classifier())[0]([1]) == "all-linear"
