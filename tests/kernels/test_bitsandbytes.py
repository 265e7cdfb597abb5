"""bitsandbytes' optimizers behind tr-optim's adapter: its numbers, a state of plain tensors, settings of their own."""

import copy

import bitsandbytes
import pytest
import torch
from adapter_runs import (
    STEPS,
    Network,
    check_resume_at_every_step,
    train,
    train_in_shards,
    trainer_of,
    weights,
)
from kernel_steps import OPTIONS, check_state, net, step
from torch import nn

from tr_dist.testing import run_ranks
from tr_optim.adapters.bitsandbytes import (
    BitsAndBytesAdamW,
    BitsAndBytesAdEMAMix,
    BitsAndBytesLion,
    BitsAndBytesRMSprop,
)

SLOW = {"lr": 1e-2, "betas": (0.8, 0.95, 0.999), "weight_decay": 0.1}
GROWING = {**SLOW, "alpha": 2.0, "t_alpha": 8, "t_beta3": 10}
RMS = {"lr": 1e-2, "alpha": 0.95, "weight_decay": 0.1}
PAIRS = [
    (BitsAndBytesAdamW, bitsandbytes.optim.AdamW8bit, OPTIONS),
    (BitsAndBytesLion, bitsandbytes.optim.Lion8bit, OPTIONS),
    (BitsAndBytesAdEMAMix, bitsandbytes.optim.AdEMAMix8bit, GROWING),
    (BitsAndBytesRMSprop, bitsandbytes.optim.RMSprop8bit, RMS),
    (BitsAndBytesAdamW, bitsandbytes.optim.AdamW, {**OPTIONS, "optim_bits": 32}),
    (BitsAndBytesLion, bitsandbytes.optim.Lion, {**OPTIONS, "optim_bits": 32}),
    (BitsAndBytesAdEMAMix, bitsandbytes.optim.AdEMAMix, {**SLOW, "optim_bits": 32}),
    (BitsAndBytesAdEMAMix, bitsandbytes.optim.AdEMAMix, {**GROWING, "optim_bits": 32}),
    (BitsAndBytesRMSprop, bitsandbytes.optim.RMSprop, {**RMS, "optim_bits": 32}),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("adapter", "library", "options"), PAIRS)
def test_weights_are_the_librarys_bit_for_bit(adapter, library, options, dtype):
    ours, theirs = net(dtype), net(dtype)
    found = step(ours, adapter(ours.parameters(), **options))
    given = {name: value for name, value in options.items() if name != "optim_bits"}
    assert torch.equal(found, step(theirs, library(theirs.parameters(), **given)))


def test_8_bits_are_near_adamw_of_torch_and_32_bits_and_small_parameters_equal_it():
    runs = {}
    for name, kind, options in (
        ("torch", torch.optim.AdamW, {}),
        ("8", BitsAndBytesAdamW, {}),
        ("32", BitsAndBytesAdamW, {"optim_bits": 32}),
    ):
        model = net()
        step(model, kind(model.parameters(), eps=1e-8, **OPTIONS, **options))
        runs[name] = model
    moved = (runs["torch"][0].weight - net()[0].weight).norm()
    assert 0 < (runs["8"][0].weight - runs["torch"][0].weight).norm() < 0.03 * moved
    torch.testing.assert_close(runs["8"][1].weight, runs["torch"][1].weight, rtol=0, atol=1e-6)
    torch.testing.assert_close(runs["32"][0].weight, runs["torch"][0].weight, rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("adapter", "library", "options"), PAIRS)
def test_a_state_is_plain_tensors_that_are_loaded_as_copies_and_go_on_bit_for_bit(adapter, library, options, dtype):
    saved = check_state(adapter, options, dtype)
    assert not any(name.startswith("qmap") for state in saved.values() for name in state)


def test_a_state_of_the_library_goes_on():
    theirs = net()
    library = bitsandbytes.optim.AdamW8bit(theirs.parameters(), **OPTIONS)
    step(theirs, library, range(7))
    ours = copy.deepcopy(theirs)
    optimizer = BitsAndBytesAdamW(ours.parameters(), **OPTIONS)
    optimizer.load_state_dict(copy.deepcopy(library.state_dict()))
    assert {group["optim_bits"] for group in optimizer.param_groups} == {8}
    assert torch.equal(step(ours, optimizer, range(7, 12)), step(theirs, library, range(7, 12)))


def test_a_state_of_other_bits_or_shapes_is_refused():
    model = net()
    step(model, optimizer := BitsAndBytesAdamW(model.parameters(), **OPTIONS), range(1))
    whole = BitsAndBytesAdamW(model.parameters(), optim_bits=32)
    saved = copy.deepcopy(optimizer.state_dict())
    for group in saved["param_groups"]:
        group["optim_bits"] = 32
    with pytest.raises(ValueError, match=r"saved state1 of a parameter of shape \(128, 64\) is torch.uint8.*float32"):
        whole.load_state_dict(saved)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][0]["state1"] = saved["state"][0]["state1"][:2]
    with pytest.raises(ValueError, match=r"of shape \(2, 64\)"):
        optimizer.load_state_dict(saved)


def test_what_is_registered_for_other_parameters_does_not_count_where_it_does_with_the_library(monkeypatch):
    manager = bitsandbytes.optim.GlobalOptimManager.get_instance()
    monkeypatch.setattr(manager, "index2config", {(0, 0): {"lr": 0.0}})
    ours, theirs = net(), net()
    step(ours, BitsAndBytesAdamW(ours.parameters(), **OPTIONS), range(2))
    step(theirs, bitsandbytes.optim.AdamW8bit(theirs.parameters(), **OPTIONS), range(2))
    assert not torch.equal(ours[0].weight, net()[0].weight)
    assert (theirs[0].weight - net()[0].weight).abs().max() == 0


@pytest.mark.parametrize("adapter", [BitsAndBytesAdamW, BitsAndBytesLion])
def test_what_has_no_effect_or_cannot_be_is_refused(adapter, monkeypatch):
    parameter = nn.Parameter(torch.ones(4, 4))
    with pytest.raises(ValueError, match=r"paged state moves between .* is on the CPU; use the optimizer that is not"):
        adapter([parameter], is_paged=True)
    with pytest.raises(ValueError, match="optim_bits=4 must be 8 or 32"):
        adapter([parameter], optim_bits=4)
    on_xla = nn.Parameter(torch.ones(4, 4))
    monkeypatch.setattr(nn.Parameter, "device", torch.device("xla"))
    with pytest.raises(ValueError, match=r"is on xla, and bitsandbytes has no kernels for XLA; use adamw_torch, or"):
        adapter([on_xla])
    monkeypatch.undo()
    assert not {"alpha", "t_alpha", "t_beta3"} & {*adapter([parameter]).param_groups[0], *adapter([parameter]).defaults}


def test_the_momentum_of_rmsprop_which_the_library_ignores_is_not_taken(tmp_path):
    first, second = net(), net()
    plain = step(first, bitsandbytes.optim.RMSprop(first.parameters(), **RMS))
    assert torch.equal(plain, step(second, bitsandbytes.optim.RMSprop(second.parameters(), **RMS, momentum=0.9)))
    with pytest.raises(ValueError, match="rmsprop_bnb does not take 'momentum'"):
        trainer_of(tmp_path, optim="rmsprop_bnb", optim_args="momentum=0.9").train()
    with pytest.raises(ValueError, match="alpha=0 must be greater than 0"):
        BitsAndBytesRMSprop(first.parameters(), alpha=0)


@pytest.mark.parametrize(
    ("name", "optim_args"),
    [
        ("adamw_bnb_8bit", None),
        ("lion_8bit", None),
        ("lion_32bit", None),
        ("ademamix", "alpha=2, t_alpha=4, t_beta3=4"),
        ("ademamix_8bit", "beta3=0.99"),
        ("rmsprop_bnb", "alpha=0.9"),
        ("rmsprop_bnb_8bit", None),
    ],
)
def test_a_run_resumed_at_any_step_ends_as_if_it_had_not_stopped(tmp_path, name, optim_args):
    trainer = check_resume_at_every_step(tmp_path, optim=name, optim_args=optim_args)
    states = trainer.optimizer.state_dict()["state"].values()
    has_codes = [state["state1"].dtype == torch.uint8 for state in states]
    assert any(has_codes) == name.endswith("8bit")
    assert not all(has_codes)


def test_a_run_uses_what_its_arguments_say_and_keeps_embeddings_in_32_bits(tmp_path):
    given = {"adam_beta1": 0.8, "adam_beta2": 0.95, "adam_epsilon": 1e-5}
    rules = [{"params": "layers.4", "lr_scale": 0.5, "optim_bits": 32}]
    trainer = train(tmp_path, optim="adamw_bnb_8bit", parameter_rules=rules, **given)
    for group in trainer.optimizer.param_groups:
        assert (group["betas"], group["eps"]) == ((0.8, 0.95), 1e-5)
    state = trainer.optimizer.state
    assert state[trainer.model.embedding.weight]["state1"].dtype == torch.float32
    assert state[trainer.model.layers[0].weight]["state1"].dtype == torch.uint8
    by_weight = {id(p): group for group in trainer.optimizer.param_groups for p in group["params"]}
    assert by_weight[id(trainer.model.layers[4].weight)]["optim_bits"] == 32
    assert by_weight[id(trainer.model.layers[0].bias)]["weight_decay"] == 0.0
    assert by_weight[id(trainer.model.layers[0].weight)]["weight_decay"] == 0.1


def test_a_run_is_near_that_of_adamw(tmp_path):
    theirs = train(tmp_path, optim="adamw_bnb_8bit")
    plain = train(tmp_path, optim="adamw_torch")
    start = torch.cat([p.detach().flatten() for p in Network().parameters()])
    assert (weights(theirs) - weights(plain)).norm() < 0.05 * (weights(plain) - start).norm()
    rates = [[entry["learning_rate"] for entry in run.state.log_history if "loss" in entry] for run in (theirs, plain)]
    assert rates[0] == rates[1]
    assert len(set(rates[0])) == STEPS


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"optim": "paged_adamw_8bit"}, "is on the CPU; use the optimizer that is not paged"),
        ({"optim": "paged_lion_32bit"}, "is on the CPU; use the optimizer that is not paged"),
        ({"optim": "paged_ademamix_8bit"}, "is on the CPU; use the optimizer that is not paged"),
        ({"optim": "paged_ademamix_32bit"}, "is on the CPU; use the optimizer that is not paged"),
        ({"optim": "adamw_bnb_8bit", "optim_args": "amsgrad=true"}, "adamw_bnb_8bit does not take 'amsgrad'"),
    ],
)
def test_a_run_is_refused_in_words(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        trainer_of(tmp_path, **options).train()


@pytest.mark.parametrize(
    ("adapter", "moments"),
    [(BitsAndBytesAdamW, 2), (BitsAndBytesLion, 1), (BitsAndBytesAdEMAMix, 3), (BitsAndBytesRMSprop, 1)],
)
def test_bytes_are_told_before_the_first_step(adapter, moments):
    model = net()
    gradients, state = adapter(model.parameters()).expected_bytes(2)
    assert gradients == 4 * sum(p.numel() for p in model.parameters())
    assert state == moments * (8192 + 4 * 32 + 4 * (128 + 1024 + 8))


def test_divided_parameters_are_refused(tmp_path):
    message = r"BitsAndBytesAdamW: a parameter of shape .* is a DTensor.*train with replicas \(strategy='ddp'\)"
    with pytest.raises(ValueError, match=message):
        run_ranks(train_in_shards, 2, str(tmp_path), {"optim": "adamw_bnb_8bit"}, timeout_s=120)
