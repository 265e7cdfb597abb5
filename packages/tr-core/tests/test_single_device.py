"""A strategy of one device, and strategies of users that leave out what it has."""

import logging
from contextlib import AbstractContextManager

import pytest
import torch

from tr_core import SingleDevice, Trainer, TrainingArguments
from tr_core.loop import clear_gradients
from tr_core.single_device import complete_strategy, warn_of_idle_devices
from tr_core.testing import check_strategy


@pytest.fixture
def four(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 4)


def test_several_devices_of_which_one_is_used_are_named_once(four, caplog):
    with caplog.at_level(logging.WARNING, "tr_core.single_device"):  # whatever level an earlier Trainer has set
        for _ in range(2):
            warn_of_idle_devices(torch.device("cuda", 0))
    (said,) = caplog.messages
    assert said.startswith("4 cuda devices are visible, and one process uses one, cuda:0; to use all")
    assert "trainer launch --nproc 4 SCRIPT, or torchrun --nproc-per-node 4 SCRIPT" in said


def test_a_run_on_the_cpu_says_nothing_of_devices_and_is_never_wrapped(four, caplog, tmp_path):
    model = torch.nn.Linear(2, 1)
    trainer = Trainer(model, TrainingArguments(output_dir=str(tmp_path), use_cpu=True))
    assert "devices are visible" not in caplog.text
    assert trainer.model_wrapped is model
    assert trainer.args.n_gpu == 0


@pytest.mark.cuda
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_several_devices_do_not_become_data_parallel(tmp_path, caplog):
    trainer = Trainer(torch.nn.Linear(2, 1), TrainingArguments(output_dir=str(tmp_path)))
    assert not isinstance(trainer.model_wrapped, torch.nn.DataParallel)
    assert trainer.args.n_gpu == 1
    assert "one process uses one, cuda:0" in caplog.text


@pytest.mark.parametrize("device", ["cpu"])
def test_a_single_device_keeps_the_promises_of_a_strategy(device):
    check_strategy(SingleDevice(device))


def test_an_object_that_lacks_methods_is_named_with_them():
    with pytest.raises(AssertionError, match="object lacks .*clip_grad_norm.* which Strategy has"):
        check_strategy(object())


@pytest.mark.parametrize("max_norm", [None, 1.0])
@pytest.mark.parametrize("together", [False, True])
def test_the_norm_of_a_step_without_a_gradient_is_where_the_parameters_are(together, max_norm):
    strategy, model = SingleDevice("meta"), torch.nn.Linear(2, 1, device="meta")
    optimizer = torch.optim.SGD(strategy.prepare(model).parameters(), lr=0.1)
    strategy._are_of_one_kind = together  # as on a GPU, which torch needs to be there
    norm = strategy.clip_grad_norm(model, optimizer, max_norm)
    assert (norm.shape, norm.device.type) == ((), "meta")


# Strategies of users


class OfTheUser:
    """A strategy by composition, which leaves out what `StrategyDefaults` has."""

    forward_is_collective = False
    given = """
        device rank local_rank world_size sum gather gather_objects all_reduce_max barrier prepare unwrap accumulate
        autocast backward clip_grad_norm step state_parts full_state_dict close
    """

    def __init__(self):
        self._single = SingleDevice("cpu")
        for name in self.given.split():
            setattr(self, name, getattr(self._single, name))


def test_a_strategy_of_a_user_is_completed_with_what_it_leaves_out_and_stays_the_same_object():
    strategy = OfTheUser()
    assert complete_strategy(strategy) is strategy
    assert strategy.binds_optimizer is False
    strategy.bind_optimizer(torch.nn.Linear(2, 2), None)
    parameter = torch.nn.Parameter(torch.ones(2))
    with strategy.gathered(parameter) as whole:
        assert whole is parameter
    assert isinstance(strategy.accumulate_fused(torch.nn.Linear(2, 2), last=True), AbstractContextManager)
    check_strategy(OfTheUser())


def test_a_strategy_that_defines_bind_optimizer_alone_is_said_to_bind_optimizers():
    bound = []

    class Binding(OfTheUser):
        def bind_optimizer(self, model, optimizer):
            bound.append(optimizer)

    strategy = complete_strategy(Binding())
    assert strategy.binds_optimizer is True
    strategy.bind_optimizer(None, "optimizer")
    assert bound == ["optimizer"]


def gradients_of(kind):
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3), torch.nn.Linear(3, 2))
    if kind == "two types":
        model[1].to(torch.float64)
    if kind == "bfloat16":
        model.to(torch.bfloat16)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    if kind == "one without":
        model[0].weight.grad = None
    return model


@pytest.mark.parametrize("max_norm", [None, 0.5, 1e6])
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "two types", "one without"])
def test_gradients_are_clipped_as_by_torch_to_the_bit(kind, max_norm, monkeypatch):
    strategy, model, expected = SingleDevice(torch.device("cpu")), gradients_of(kind), gradients_of(kind)
    strategy.prepare(model)
    sorted_by_torch, original = [], torch.nn.utils.clip_grad_norm_
    with monkeypatch.context() as patched:
        patched.setattr(torch.nn.utils, "clip_grad_norm_", lambda *g: (sorted_by_torch.append(g), original(*g))[1])
        norm = strategy.clip_grad_norm(model, torch.optim.SGD(model.parameters()), max_norm)
    assert bool(sorted_by_torch) == (kind == "two types" and max_norm is not None)
    by_torch = torch.nn.utils.clip_grad_norm_(expected.parameters(), float("inf") if max_norm is None else max_norm)
    assert norm.equal(by_torch)
    assert norm.dtype == by_torch.dtype
    for mine, other in zip(model.parameters(), expected.parameters(), strict=True):
        assert (mine.grad is None) == (other.grad is None)
        assert mine.grad is None or mine.grad.equal(other.grad)


def test_without_any_gradient_the_norm_is_zero():
    strategy, model = SingleDevice(torch.device("cpu")), torch.nn.Linear(2, 2)
    strategy.prepare(model)
    assert strategy.clip_grad_norm(model, torch.optim.SGD(model.parameters()), 1.0) == 0


def test_gradients_are_cleared_by_an_optimizer_that_has_a_way_of_its_own():
    class Own(torch.optim.SGD):
        cleared = 0

        def zero_grad(self, set_to_none=True):
            self.cleared += 1

    model = gradients_of("float32")
    own, assigned, plain = (
        Own(model.parameters()),
        torch.optim.SGD(model.parameters()),
        torch.optim.SGD(model[:2].parameters()),
    )
    seen = []
    assigned.zero_grad = lambda set_to_none: seen.append(set_to_none)
    clear_gradients(own)
    clear_gradients(assigned)
    assert (own.cleared, seen) == (1, [True])
    assert all(parameter.grad is not None for parameter in model.parameters())
    clear_gradients(plain)
    assert [parameter.grad is None for parameter in model.parameters()] == [True] * 4 + [False] * 2
