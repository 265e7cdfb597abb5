"""Moments in 8 bits in the Trainer: what `test_optimizers_in_trainer.py` does not ask of every optimizer."""

import pytest
import torch
from shared.results import logged, weights
from torch import nn

from tr_core import Trainer, TrainingArguments
from tr_dist.testing import run_ranks

NAMES = ["adamw_8bit", "galore_adamw_8bit", "galore_adamw_8bit_layerwise"]
EXACT = {
    "adamw_8bit": "adamw_torch",
    "galore_adamw_8bit": "galore_adamw",
    "galore_adamw_8bit_layerwise": "galore_adamw_layerwise",
}


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.LayerNorm(16)
        self.mlp = nn.Sequential(nn.Linear(16, 96), nn.GELU(), nn.Linear(96, 64), nn.Linear(64, 8))

    def forward(self, x, labels):
        out = self.mlp(self.norm(x))
        return {"loss": (out - labels).square().mean(), "logits": out}


def rows():
    generator = torch.Generator().manual_seed(0)
    mixing = torch.randn(16, 8, generator=generator) / 4
    inputs = [torch.randn(16, generator=generator) for _ in range(64)]
    return [{"x": x, "labels": torch.tanh(x @ mixing)} for x in inputs]


def trainer_of(folder, name, *, model=None, **options):
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
    return Trainer(model or Network(), args, train_dataset=rows())


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


@pytest.mark.parametrize("name", NAMES)
def test_decay_betas_and_eps_are_those_of_the_run(tmp_path, name):
    own = {"adam_beta1": 0.8, "adam_beta2": 0.95, "adam_epsilon": 1e-6}
    trainer = train(tmp_path, name, max_steps=1, **own)
    groups = trainer.optimizer.param_groups
    assert {(group["betas"], group["eps"]) for group in groups} == {((0.8, 0.95), 1e-6)}
    decayed = {id(p) for group in groups if group["weight_decay"] for p in group["params"]}
    names = {name for name, p in trainer.model.named_parameters() if id(p) in decayed}
    assert names == {"mlp.0.weight", "mlp.2.weight", "mlp.3.weight"}
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


def test_rules_may_keep_float32_moments_of_some_parameters(tmp_path):
    rules = [{"params": "mlp.2", "min_8bit_size": 10**9}]
    trainer = train(tmp_path, "adamw_8bit", parameter_rules=rules, max_steps=2)
    mlp, state = trainer.model.mlp, trainer.optimizer.state
    assert state[mlp[2].weight]["exp_avg"].dtype == torch.float32
    assert state[mlp[0].weight]["exp_avg"].dtype == state[mlp[3].weight]["exp_avg"].dtype == torch.int8


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


def train_on_rank(folder, name, options, resume=None):
    trainer = train(folder, name, resume=resume, max_grad_norm=0, **options)
    whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in trainer.model.parameters()]
    trainer.strategy.close()
    return torch.cat([tensor.detach().flatten() for tensor in whole])


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name != NAMES[2])) for name in NAMES])
def test_shards_resume_with_the_same_bits_and_on_other_numbers_of_ranks(tmp_path, name):
    shards = {"per_device_train_batch_size": 4, "fsdp": "full_shard"}
    saving = {**shards, "save_strategy": "steps", "save_steps": 3}
    whole = run_ranks(train_on_rank, 2, str(tmp_path / "whole"), name, saving)[0]
    folder = str(tmp_path / "whole/checkpoint-3")
    resumed = run_ranks(train_on_rank, 2, str(tmp_path / "again"), name, shards, folder)
    assert torch.equal(resumed[0], whole)
    moved = (whole - weights_before()).norm()
    four = run_ranks(train_on_rank, 4, str(tmp_path / "4"), name, {**shards, "per_device_train_batch_size": 2}, folder)
    alone = train_on_rank(str(tmp_path / "1"), name, {"per_device_train_batch_size": 8}, folder)
    for found in (four[0], alone):
        assert (found - whole).norm() < 1e-3 * moved
