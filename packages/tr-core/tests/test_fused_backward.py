"""Optimizers that consume gradients in the backward pass, by one that needs no other package."""

import logging
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from support.callbacks import on
from support.runs import ScaledDevice
from torch import nn

from tr_core import SingleDevice, Trainer, TrainerCallback
from tr_core.optim.fused_backward import kind, skips_nonfinite
from tr_core.testing import check_in_backward


class HookedSGD(torch.optim.SGD):
    """Adds gradients up in hooks, and applies them in `step`."""

    fused_in_backward = True
    updates_in_backward = False
    reduces_own_gradients = False
    norm_is_estimated = False

    def __init__(self, params, lr):
        super().__init__(params, lr)
        self.sums, self.handles, self.calls = {}, [], []

    def bind(self, collectives):
        self.calls.append(("bind", collectives.world_size))

    def backward(self, loss, *, last=True, scale=None):
        self.calls.append(("backward", last))
        if not self.handles:
            parameters = [p for group in self.param_groups for p in group["params"]]
            self.handles = [p.register_post_accumulate_grad_hook(self.take) for p in parameters]
        self.is_armed = True
        loss.backward()
        self.is_armed = False

    is_armed = False

    def take(self, parameter):
        if self.is_armed:
            self.sums[parameter] = self.sums.get(parameter, 0) + parameter.grad
            parameter.grad = None

    def clip_grad_norm(self, max_norm):
        norm = torch.stack([g.norm() for g in self.sums.values()]).norm()
        if max_norm is not None:
            for gradient in self.sums.values():
                gradient.mul_((max_norm / (norm + 1e-6)).clamp(max=1.0))
        return norm

    @torch.no_grad()
    def step(self, closure=None):
        self.calls.append("step")
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter in self.sums:
                    parameter.sub_(self.sums[parameter], alpha=group["lr"])
        self.sums = {}

    def zero_grad(self, set_to_none=True):
        super().zero_grad(set_to_none)
        self.sums = {}

    def detach(self):
        for handle in self.handles:
            handle.remove()
        self.handles = []


class Regression(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 1)

    def forward(self, x, labels):
        out = self.layer(x).squeeze(-1)
        return {"loss": (out - labels).square().mean(), "logits": out}


def rows(number=32):
    generator = torch.Generator().manual_seed(0)
    return [{"x": torch.randn(4, generator=generator), "labels": torch.tensor(float(i % 3))} for i in range(number)]


@pytest.fixture
def build(make_trainer):
    """Build a Trainer of six steps with such an optimizer."""

    def make(kind, **changes):
        options = {"max_steps": 6, "learning_rate": 0.1, "max_grad_norm": 0.5, **changes}
        chosen = (kind, {"lr": options["learning_rate"]})
        return make_trainer(model=Regression(), train_dataset=rows(), optimizer_cls_and_kwargs=chosen, **options)

    return make


def test_such_an_optimizer_keeps_its_promises():
    check_in_backward(lambda model: HookedSGD(model.parameters(), 0.1))


@pytest.mark.parametrize("accumulation", [1, 4])
def test_the_loop_trains_through_it_as_through_any_other(build, accumulation):
    options = {"gradient_accumulation_steps": accumulation}
    plain, hooked = build(torch.optim.SGD, **options), build(HookedSGD, **options)
    plain.train()
    hooked.train()
    for usual, other in zip(plain.model.parameters(), hooked.model.parameters(), strict=True):
        assert (usual - other).abs().max() < 1e-6
    for usual, other in zip(plain.state.log_history, hooked.state.log_history, strict=True):
        for name in ("loss", "grad_norm", "learning_rate"):
            assert usual.get(name, 0.0) == pytest.approx(other.get(name, 0.0), rel=1e-5)
    step = [("backward", number == accumulation) for number in range(1, accumulation + 1)] + ["step"]
    assert hooked.optimizer.calls == [("bind", 1)] + step * 6


def test_its_hooks_and_the_wrapper_are_gone_after_an_exception(build):
    class Fail(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, **kwargs):
            raise KeyError("on purpose")

    trainer = build(HookedSGD, callbacks=[Fail()])
    strategy = trainer.strategy
    with pytest.raises(KeyError):
        trainer.train()
    assert trainer.strategy is strategy
    assert trainer.optimizer.handles == []
    assert trainer.optimizer.sums == {}


def test_evaluation_and_saving_see_the_strategy_through_the_wrapper(build):
    class Look(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            self.strategy = trainer.strategy

    look = Look()
    trainer = build(HookedSGD, callbacks=[look])
    trainer.train()
    assert look.strategy is not trainer.strategy
    assert look.strategy.device == trainer.strategy.device
    assert look.strategy.gather_objects(3) == [3]


def test_an_estimated_norm_is_said_to_be_one_once(build, caplog):
    class Guessing(HookedSGD):
        norm_is_estimated = True

    caplog.set_level(logging.INFO)
    build(Guessing, log_level="info").train()
    assert caplog.text.count("grad_norm is an estimate") == 1


def test_a_left_out_step_is_one_that_is_not_made(build):
    data = rows()
    data[5]["x"][0] = float("nan")
    trainer = build(HookedSGD, on_nonfinite="skip", max_steps=8)
    trainer.train_dataset = data
    trainer.train()
    assert trainer.optimizer.calls.count("step") == 7
    assert all(p.isfinite().all() for p in trainer.model.parameters())


def test_a_loss_scaler_sees_overflows_where_no_gradient_is_left(build):
    class Unscaling(HookedSGD):
        def backward(self, loss, *, last=True, scale=None):
            self.scale = scale
            super().backward(loss * scale, last=last)

        def take(self, parameter):
            parameter.grad.div_(self.scale)
            super().take(parameter)

    class Overflow(Regression):
        calls = 0

        def forward(self, x, labels):
            outputs = super().forward(x, labels)
            Overflow.calls += 1
            return {**outputs, "loss": outputs["loss"] * (1e38 if Overflow.calls == 2 else 1.0)}

    applied = []
    note = on("on_optimizer_step", lambda **event: applied.append(event["applied"]))
    trainer = build(Unscaling, callbacks=[note], max_steps=3)
    trainer.model = Overflow()
    trainer.strategy = ScaledDevice(8.0)
    trainer.train()
    assert applied == [True, False, True]
    assert trainer.strategy.scale == 4.0


def test_an_optimizer_that_only_says_so_is_refused(build):
    class Pretending(torch.optim.SGD):
        fused_in_backward = True

    with pytest.raises(
        ValueError, match="says that it consumes gradients .* but has no backward, bind, clip_grad_norm"
    ):
        build(Pretending).train()


def test_gradients_that_are_exchanged_after_every_micro_batch_are_refused(build):
    config = {"gradient_accumulation_kwargs": {"sync_each_batch": True}}
    with pytest.raises(ValueError, match="sync_each_batch=True cannot be used with"):
        build(HookedSGD, accelerator_config=config).train()


def test_several_ranks_need_an_optimizer_that_averages(build):
    class Two(SingleDevice):
        world_size = 2

    trainer = build(HookedSGD, trainer_class=partial(Trainer, strategy=Two("cpu")))
    with pytest.raises(
        ValueError, match="does not average gradients over ranks, and they are consumed before Two could"
    ):
        trainer.train()


@pytest.mark.parametrize(
    ("attributes", "expected"),
    [
        ({}, "step"),
        ({"fused_in_backward": False, "updates_in_backward": True}, "step"),
        ({"fused_in_backward": True, "updates_in_backward": False}, "backward"),
        ({"fused_in_backward": True, "updates_in_backward": True}, "backward-update"),
        ({"fused_in_backward": True}, "backward-update"),
    ],
)
def test_one_function_says_when_an_optimizer_uses_gradients(attributes, expected):
    assert kind(SimpleNamespace(**attributes)) == expected
    assert skips_nonfinite(SimpleNamespace(leaves_out_nonfinite=True))
    assert not skips_nonfinite(SimpleNamespace())
