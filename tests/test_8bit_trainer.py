"""Moments in 8 bits in the Trainer: decay, betas, schedules, accumulation, clipping, scaling, resume."""

import pytest
import torch
from shared.callbacks import KeepWeights
from shared.results import logged, weights
from torch import nn

from tr_core import SingleDevice, Trainer, TrainingArguments
from tr_core.testing import set_loss_scaler

NAMES = ["adamw_8bit", "galore_adamw_8bit", "galore_adamw_8bit_layerwise"]
EXACT = {
    "adamw_8bit": "adamw_torch",
    "galore_adamw_8bit": "galore_adamw",
    "galore_adamw_8bit_layerwise": "galore_adamw_layerwise",
}


class Network(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.LayerNorm(16)
        self.mlp = nn.Sequential(nn.Linear(16, 96), nn.GELU(), nn.Dropout(dropout), nn.Linear(96, 64), nn.Linear(64, 8))
        self.calls, self.bad_call = 0, None

    def forward(self, x, labels):
        out = self.mlp(self.norm(x))
        self.calls += 1
        factor = 1e38 if self.calls == self.bad_call else 1.0
        return {"loss": (out - labels).square().mean() * factor, "logits": out}


def rows(bad=()):
    generator = torch.Generator().manual_seed(0)
    mixing = torch.randn(16, 8, generator=generator) / 4
    made = []
    for index in range(64):
        x = torch.randn(16, generator=generator)
        made.append({"x": x, "labels": torch.tanh(x @ mixing)})
        if index in bad:
            made[index]["x"][0] = float("nan")
    return made


def trainer_of(folder, name, *, model=None, data=None, callbacks=(), **options):
    optim_args = [] if EXACT.get(name) is None else ["min_8bit_size=256"]
    if "galore" in name:
        options = {"optim_target_modules": "all-linear", **options}
        optim_args += ["rank=4", "update_proj_gap=3", "scale=1.0"]
    options = {
        "optim": name,
        "optim_args": ", ".join(optim_args) or None,
        "per_device_train_batch_size": 8,
        "max_steps": 10,
        "learning_rate": 1e-2,
        "weight_decay": 0.1,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        **options,
    }
    args = TrainingArguments(output_dir=str(folder), **options)
    return Trainer(model or Network(), args, train_dataset=data or rows(), callbacks=list(callbacks))


def train(folder, name, *, resume=None, **options):
    trainer = trainer_of(folder, name, **options)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def codes(trainer):
    return [state for state in trainer.optimizer.state.values() if state["exp_avg"].dtype == torch.int8]


@pytest.mark.parametrize("name", NAMES)
def test_runs_are_close_to_those_with_float32_moments(tmp_path, name):
    options = {"max_steps": 40, "num_train_epochs": 5, "max_grad_norm": 0.5, "warmup_steps": 5}
    ours, exact = train(tmp_path, name, **options), train(tmp_path, EXACT[name], **options)
    assert codes(ours)
    assert logged(ours, "learning_rate") == logged(exact, "learning_rate")
    assert logged(ours, "loss")[-1] < 0.5 * logged(ours, "loss")[0]
    assert logged(ours, "loss") == pytest.approx(logged(exact, "loss"), rel=0.05)
    moved = (weights(exact) - weights_before()).norm()
    assert 0 < (weights(ours) - weights(exact)).norm() < 0.1 * moved


def weights_before():
    return torch.cat([p.detach().flatten() for p in Network().parameters()])


@pytest.mark.parametrize("options", [{}, {"bf16": True}, {"lr_scheduler_type": "cosine", "warmup_steps": 3}])
def test_layerwise_gives_the_same_bits_with_one_batch_a_step(tmp_path, options):
    step, layerwise = (train(tmp_path, name, max_grad_norm=0, **options) for name in NAMES[1:])
    assert torch.equal(weights(step), weights(layerwise))
    assert logged(step, "loss") == logged(layerwise, "loss")


@pytest.mark.parametrize("name", NAMES)
def test_micro_batches_add_up_to_one_batch_but_for_single_codes(tmp_path, name):
    one = train(tmp_path, name, max_grad_norm=0)
    accumulated = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
    four = train(tmp_path, name, max_grad_norm=0, **accumulated)
    assert (weights(one) - weights(four)).norm() < 2e-3 * (weights(one) - weights_before()).norm()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("options", [{}, {"bf16": True, "gradient_accumulation_steps": 2}])
def test_a_run_resumed_after_any_step_gives_the_same_bits(tmp_path, name, options):
    options = {"max_steps": 5, "per_device_train_batch_size": 4, **options}
    whole = train(tmp_path / "whole", name, model=Network(0.2), save_strategy="steps", save_steps=1, **options)
    for step in range(1, 5):
        folder = str(tmp_path / f"whole/checkpoint-{step}")
        resumed = train(tmp_path / "other", name, model=Network(0.2), resume=folder, **options)
        assert codes(resumed)
        assert torch.equal(weights(whole), weights(resumed)), step


@pytest.mark.parametrize("name", NAMES)
def test_decay_betas_and_eps_are_those_of_the_run(tmp_path, name):
    own = {"adam_beta1": 0.8, "adam_beta2": 0.95, "adam_epsilon": 1e-6}
    trainer = train(tmp_path, name, max_steps=1, **own)
    groups = trainer.optimizer.param_groups
    assert {(group["betas"], group["eps"]) for group in groups} == {((0.8, 0.95), 1e-6)}
    decayed = {id(p) for group in groups if group["weight_decay"] for p in group["params"]}
    names = {name for name, p in trainer.model.named_parameters() if id(p) in decayed}
    assert names == {"mlp.0.weight", "mlp.3.weight", "mlp.4.weight"}
    assert {group["weight_decay"] for group in groups} == {0.1, 0.0}
    trainer = train(tmp_path, name, max_steps=1, weight_decay=0.0)
    assert {group["weight_decay"] for group in trainer.optimizer.param_groups} == {0.0}


@pytest.mark.parametrize("name", NAMES)
def test_biases_and_small_matrices_train(tmp_path, name):
    model = Network()
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.bias)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    trained = train(tmp_path, name, model=model, max_steps=4, optim_args=None, lr_scheduler_type="constant")
    assert len(codes(trained)) == 1, "the others are below 4096 elements"
    for name, parameter in model.named_parameters():
        assert (parameter - before[name]).abs().max() > 5e-3, name


@pytest.mark.parametrize("name", NAMES)
def test_steps_that_are_not_finite_are_left_out(tmp_path, name):
    trainer = train(tmp_path, name, data=rows(bad=[5, 23]), on_nonfinite="skip", seed=3)
    assert sum(logged(trainer, "skipped_steps")) >= 2
    assert weights(trainer).isfinite().all()


@pytest.mark.parametrize("name", NAMES)
def test_a_step_that_overflows_under_loss_scaling_leaves_everything_untouched(tmp_path, name):
    model, keep = Network(), KeepWeights()
    model.bad_call = 3
    trainer = trainer_of(tmp_path, name, model=model, max_steps=6, callbacks=[keep])
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    trainer.strategy = set_loss_scaler(SingleDevice("cpu"), scaler)
    trainer.train()
    assert keep.applied == [True, True, False, True, True, True]
    assert torch.equal(keep.weights[1], keep.weights[2])
    assert all(torch.equal(a, b) for a, b in zip(keep.states[1], keep.states[2], strict=True))
    assert scaler.get_scale() == 512.0


def test_rules_may_keep_float32_moments_of_some_parameters(tmp_path):
    rules = [{"params": "mlp.3", "min_8bit_size": 10**9}]
    trainer = train(tmp_path, "adamw_8bit", parameter_rules=rules, max_steps=2)
    mlp, state = trainer.model.mlp, trainer.optimizer.state
    assert state[mlp[3].weight]["exp_avg"].dtype == torch.float32
    assert state[mlp[0].weight]["exp_avg"].dtype == state[mlp[4].weight]["exp_avg"].dtype == torch.int8


@pytest.mark.parametrize(("first", "second"), [("adamw_torch", "adamw_8bit"), ("galore_adamw_8bit", "galore_adamw")])
def test_a_run_with_other_moments_is_not_resumed_in_silence(tmp_path, first, second):
    train(tmp_path, first, max_steps=2, save_strategy="steps", save_steps=2)
    with pytest.raises(ValueError, match=rf"{first}|AdamW"):
        train(tmp_path, second, max_steps=4, resume=True)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("adamw_8bit", {"optim_args": "rank=4"}, "adamw_8bit does not take 'rank'; it takes min_8bit_size"),
        ("adamw_8bit", {"optim_args": "min_8bit_size=few"}, "min_8bit_size='few' of adamw_8bit needs a number"),
        ("adamw_8bit", {"optim_args": "min_8bit_size=-1"}, "min_8bit_size=-1 must be a whole number from 0"),
        ("adamw_8bit", {"optim_target_modules": ["mlp"]}, "has no effect on optim='adamw_8bit'"),
        ("galore_adamw_8bit", {"optim_target_modules": None}, "optim_target_modules names, and it is None"),
        ("galore_adamw_8bit", {"optim_args": "mode=deferred"}, "galore_adamw_8bit does not take 'mode'"),
        ("galore_adamw", {"optim_args": "min_8bit_size=0"}, "galore_adamw does not take 'min_8bit_size'"),
        ("galore_adamw_8bit_layerwise", {"optim_args": "mode=step"}, "is galore_adamw_8bit; use that name"),
    ],
)
def test_what_cannot_be_done_is_refused_before_training(tmp_path, name, options, message):
    with pytest.raises(ValueError, match=message):
        train(tmp_path, name, **options)
