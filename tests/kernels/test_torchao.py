"""torchao's optimizers behind tr-optim's adapter: its numbers, plain learning rates and a state of plain tensors."""

import copy

import pytest
import torch
import torchao.optim
from adapter_runs import STEPS, check_resume_at_every_step, train, train_in_shards, trainer_of
from kernel_steps import OPTIONS, check_state, net, step
from torch import nn

from tr_dist.testing import run_ranks
from tr_optim.adapters.torchao import TorchAOAdamW4bit, TorchAOAdamW8bit

PAIRS = [(TorchAOAdamW8bit, torchao.optim.AdamW8bit), (TorchAOAdamW4bit, torchao.optim.AdamW4bit)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("adapter", "library"), PAIRS)
def test_weights_are_the_librarys_bit_for_bit(adapter, library, dtype):
    ours, theirs = net(dtype), net(dtype)
    found = step(ours, adapter(ours.parameters(), **OPTIONS))
    with torch.compiler.set_stance("force_eager"):
        assert torch.equal(found, step(theirs, library(theirs.parameters(), **OPTIONS)))


@pytest.mark.filterwarnings("ignore")  # torch's compiler gives several of its own
def test_compiled_it_differs_by_rounding_only():
    runs = []
    for compiles in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(64, 64, bias=False)
        runs.append(step(model, TorchAOAdamW8bit(model.parameters(), **OPTIONS, compile=compiles), range(2)))
    torch.testing.assert_close(runs[0], runs[1], rtol=0, atol=1e-4)


def test_small_parameters_have_adamw_of_torch():
    ours, plain = net(), net()
    step(ours, TorchAOAdamW8bit(ours.parameters(), **OPTIONS))
    step(plain, torch.optim.AdamW(plain.parameters(), **OPTIONS))
    torch.testing.assert_close(ours[1].weight, plain[1].weight, rtol=0, atol=1e-6)
    moved = (plain[0].weight - net()[0].weight).norm()
    assert 0 < (ours[0].weight - plain[0].weight).norm() < 0.03 * moved


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("adapter", "library"), PAIRS)
def test_a_state_is_plain_tensors_that_are_loaded_as_copies_and_go_on_bit_for_bit(adapter, library, dtype):
    saved = check_state(adapter, OPTIONS, dtype)
    assert saved[0]["exp_avg.scale"].dtype == torch.float32


def test_a_state_of_the_library_goes_on():
    theirs = net()
    library = torchao.optim.AdamW8bit(theirs.parameters(), **OPTIONS)
    with torch.compiler.set_stance("force_eager"):
        step(theirs, library, range(7))
        ours = copy.deepcopy(theirs)
        optimizer = TorchAOAdamW8bit(ours.parameters(), **OPTIONS)
        optimizer.load_state_dict(library.state_dict())
        assert torch.equal(step(ours, optimizer, range(7, 12)), step(theirs, library, range(7, 12)))
    assert {type(group["lr"]) for group in optimizer.param_groups} == {float}


def test_a_state_of_other_bits_is_refused():
    model = net()
    step(model, optimizer := TorchAOAdamW8bit(model.parameters(), **OPTIONS), range(1))
    with pytest.raises(
        ValueError, match=r"saved exp_avg.codes of .* \(128, 64\) has the shape \(128, 64\), and \(4096,"
    ):
        TorchAOAdamW4bit(model.parameters()).load_state_dict(optimizer.state_dict())


def test_rates_stay_numbers_for_schedules_and_closures_are_run():
    model = nn.Linear(4, 4)
    optimizer = TorchAOAdamW8bit(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)

    def closure():
        loss = model(torch.ones(2, 4)).square().mean()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() > 0
    schedule.step()
    assert optimizer.param_groups[0]["lr"] == 0.05


def test_hooks_are_called_once_a_step_whatever_else_uses_the_library():
    torchao.optim.AdamW8bit([nn.Parameter(torch.ones(2))])
    model, called = net(), []
    optimizer = TorchAOAdamW8bit(model.parameters())
    optimizer.register_step_post_hook(lambda *given: called.append(1))
    step(model, optimizer, range(2))
    assert len(called) == 2


@pytest.mark.parametrize("name", ["adamw_torch_8bit", "adamw_torch_4bit"])
def test_a_run_resumed_at_any_step_ends_as_if_it_had_not_stopped(tmp_path, name):
    trainer = check_resume_at_every_step(tmp_path, optim=name)
    assert any("exp_avg.codes" in state for state in trainer.optimizer.state_dict()["state"].values())


def test_a_run_uses_what_its_arguments_say(tmp_path):
    given = {"adam_beta1": 0.8, "adam_beta2": 0.95, "adam_epsilon": 1e-5}
    trainer = train(tmp_path, optim="adamw_torch_8bit", optim_args="compile=false", **given)
    for group in trainer.optimizer.param_groups:
        assert (group["betas"], group["eps"]) == ((0.8, 0.95), 1e-5)
    assert {group["weight_decay"] for group in trainer.optimizer.param_groups} == {0.1, 0.0}
    rates = [entry["learning_rate"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(set(rates)) == STEPS


def test_a_run_is_refused_in_words(tmp_path):
    with pytest.raises(ValueError, match="adamw_torch_8bit does not take 'amsgrad'"):
        trainer_of(tmp_path, optim="adamw_torch_8bit", optim_args="amsgrad=true").train()


@pytest.mark.parametrize(("adapter", "bits"), [(TorchAOAdamW8bit, 8), (TorchAOAdamW4bit, 4)])
def test_bytes_are_told_before_the_first_step_and_are_those_of_the_state(adapter, bits):
    model = net()
    gradients, state = adapter(model.parameters()).expected_bytes(2)
    assert gradients == 4 * sum(p.numel() for p in model.parameters())
    step(model, optimizer := adapter(model.parameters()), range(1))
    saved = optimizer.state_dict()["state"].values()
    assert state == sum(value.numel() * value.element_size() for part in saved for value in part.values())


def test_divided_parameters_are_refused(tmp_path):
    message = r"TorchAOAdamW8bit: a parameter of shape .* is a DTensor.*train with replicas \(strategy='ddp'\)"
    with pytest.raises(ValueError, match=message):
        run_ranks(train_in_shards, 2, str(tmp_path), {"optim": "adamw_torch_8bit"}, timeout_s=120)
