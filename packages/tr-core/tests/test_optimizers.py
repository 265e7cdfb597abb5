"""Optimizers of torch by their names, with their options and parameter groups."""

import pytest
from support.models import Classifier
from torch import nn

from tr_core import TrainingArguments, plugins
from tr_core.optim.optimizers import optimizer_factory, optimizer_names


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
