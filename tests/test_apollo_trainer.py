"""APOLLO and Fira in the Trainer, by arguments alone: accumulation, clipping, resume, activation checkpointing."""

import logging

import pytest
import torch
from shared.models import Tied
from shared.results import distance, weights
from torch import nn

from tr_core import Trainer, TrainingArguments
from tr_core.testing import check_in_backward
from tr_optim import APOLLOAdamW, FiraAdamW

NAMES = ["apollo_adamw", "apollo_mini", "fira_adamw"]
# A seed by which no projection is small by chance, so that rounding is not made large.
COMMON = "update_proj_gap=3, seed=1"
OPTIM_ARGS = {
    "apollo_adamw": f"rank=4, {COMMON}",
    "apollo_mini": f"{COMMON}, scale=4",
    "fira_adamw": f"rank=4, {COMMON}",
}


class Network(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.LayerNorm(16)
        self.self_attn = nn.Linear(16, 24)
        self.mlp = nn.Sequential(nn.Linear(24, 32), nn.GELU(), nn.Dropout(dropout), nn.Linear(32, 8))

    def forward(self, x, labels):
        out = self.mlp(self.self_attn(self.norm(x)))
        return {"loss": (out - labels).square().mean(), "logits": out}


def rows(bad=()):
    generator = torch.Generator().manual_seed(0)
    made = [
        {"x": torch.randn(16, generator=generator), "labels": torch.randn(8, generator=generator)} for _ in range(64)
    ]
    for index in bad:
        made[index]["x"][0] = float("nan")
    return made


def words():
    generator = torch.Generator().manual_seed(0)
    tokens = [torch.randint(20, (6,), generator=generator) for _ in range(32)]
    return [{"x": t, "labels": t.roll(-1)} for t in tokens]


def train(folder, name, *, resume=None, model=None, data=None, **options):
    options = {
        "optim": name,
        "optim_target_modules": ["attn", "mlp"],
        "optim_args": OPTIM_ARGS[name.removesuffix("_layerwise")],
        "per_device_train_batch_size": 8,
        "max_steps": 8,
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
    trainer = Trainer(model or Network(), args, train_dataset=data or rows())
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def logged(trainer, key):
    return [entry[key] for entry in trainer.state.log_history if key in entry]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("options", [{}, {"bf16": True}, {"lr_scheduler_type": "cosine", "warmup_steps": 3}])
def test_layerwise_gives_the_same_bits_with_one_batch_a_step(tmp_path, name, options):
    step = train(tmp_path, name, max_grad_norm=0, **options)
    layerwise = train(tmp_path, f"{name}_layerwise", max_grad_norm=0, **options)
    assert torch.equal(weights(step), weights(layerwise))
    assert not any(p._post_accumulate_grad_hooks for p in layerwise.model.parameters())
    for key in ("loss", "learning_rate"):
        assert logged(step, key) == logged(layerwise, key)
    assert logged(step, "grad_norm") == pytest.approx(logged(layerwise, "grad_norm"), rel=1e-6)
    assert distance(step, train(tmp_path, name, max_grad_norm=0, max_steps=1, learning_rate=0.0)) > 1e-3


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("max_grad_norm", [0, 0.3])
def test_micro_batches_add_up_to_one_batch_with_clipping_too(tmp_path, name, max_grad_norm):
    one = train(tmp_path, name, max_grad_norm=max_grad_norm)
    accumulated = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "max_grad_norm": max_grad_norm}
    for suffix in ("", "_layerwise"):
        four = train(tmp_path, name + suffix, **accumulated)
        assert distance(one, four) < 1e-6
        assert logged(one, "grad_norm") == pytest.approx(logged(four, "grad_norm"), rel=1e-4)


def test_layerwise_clips_to_the_norm_of_the_arguments_and_says_at_what_cost(tmp_path, caplog):
    with caplog.at_level(logging.INFO, logger="tr_optim"):
        clipped = train(tmp_path, "fira_adamw_layerwise", max_grad_norm=0.3, log_level="info")
    told = (
        "fira_adamw_layerwise clips to max_grad_norm=0.3 by a second backward pass of each step's last micro-batch; "
        "max_grad_norm=0 saves it, and norm_growth=1.01 limits updates anyway"
    )
    assert caplog.text.count(told) == 1
    assert "fira_adamw_layerwise projects 3 matrices" in caplog.text
    assert distance(clipped, train(tmp_path, "fira_adamw", max_grad_norm=0.3)) < 1e-6
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="tr_optim"):
        free = train(tmp_path, "fira_adamw_layerwise", max_grad_norm=0, log_level="info")
    assert "second backward" not in caplog.text
    assert distance(clipped, free) > 1e-6


@pytest.mark.parametrize("name", [name + suffix for name in NAMES for suffix in ("", "_layerwise")])
@pytest.mark.parametrize("options", [{}, {"bf16": True, "gradient_accumulation_steps": 2}])
def test_a_run_resumed_after_any_step_gives_the_same_bits(tmp_path, name, options):
    options = {"max_steps": 7, "per_device_train_batch_size": 4, **options}
    whole = train(tmp_path / "whole", name, model=Network(0.2), save_strategy="steps", save_steps=1, **options)
    for step in range(1, 7):
        folder = str(tmp_path / f"whole/checkpoint-{step}")
        resumed = train(tmp_path / "other", name, model=Network(0.2), resume=folder, **options)
        assert torch.equal(weights(whole), weights(resumed)), step


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("max_grad_norm", [0, 0.5])
def test_activation_checkpointing_of_shared_weights_changes_nothing(tmp_path, reentrant, accumulation, max_grad_norm):
    common = {"data": words(), "optim_target_modules": "all-linear", "max_steps": 6, "max_grad_norm": max_grad_norm}
    plain = train(tmp_path, "fira_adamw", model=Tied(), **common)
    checkpointing = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": reentrant}}
    size = {"per_device_train_batch_size": 8 // accumulation, "gradient_accumulation_steps": accumulation}
    layerwise = train(tmp_path, "fira_adamw_layerwise", model=Tied(), **common, **checkpointing, **size)
    assert distance(plain, layerwise) < 1e-6


@pytest.mark.parametrize("name", NAMES)
def test_steps_that_are_not_finite_are_left_out(tmp_path, name):
    trained = train(tmp_path, name, data=rows(bad=[5, 23]), on_nonfinite="skip", seed=3)
    assert sum(logged(trained, "skipped_steps")) >= 1
    assert weights(trained).isfinite().all()
    states = [value for state in trained.optimizer.state.values() for value in state.values()]
    assert all(value.isfinite().all() for value in states)


def test_the_options_that_transformers_has_for_apollo_are_taken(tmp_path):
    given = "rank=2,proj=random,scale_type=tensor,scale=128,update_proj_gap=5,proj_type=std"
    trained = train(tmp_path, "apollo_adamw_layerwise", optim_args=given)
    group = next(group for group in trained.optimizer.param_groups if group["projects"])
    taken = {name: group[name] for name in ("rank", "proj", "scale_type", "scale", "update_proj_gap", "proj_type")}
    assert taken == {
        "rank": 2,
        "proj": "random",
        "scale_type": "tensor",
        "scale": 128.0,
        "update_proj_gap": 5,
        "proj_type": "std",
    }


def test_apollo_mini_is_apollo_with_one_direction_and_one_step_size(tmp_path):
    mini = train(tmp_path, "apollo_mini", optim_args=None)
    apollo = train(tmp_path, "apollo_adamw", optim_args="rank=1,scale_type=tensor,scale=128")
    assert torch.equal(weights(mini), weights(apollo))
    assert mini.optimizer.state[mini.model.self_attn.weight]["exp_avg"].numel() == 24


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("apollo_adamw", {"optim_target_modules": None}, "optim_target_modules names, and it is None"),
        ("apollo_adamw_layerwise", {"optim_args": "mode=deferred"}, "apollo_adamw_layerwise does not take 'mode'"),
        ("fira_adamw", {"optim_args": "proj=random"}, "fira_adamw does not take 'proj'"),
        ("apollo_adamw", {"optim_args": "scale_type=row"}, "scale_type='row' is not known"),
        ("fira_adamw", {"optim_args": "norm_growth=0.5"}, "norm_growth=0.5 must be at least 1"),
        ("fira_adamw_layerwise", {"on_nonfinite": "skip"}, "on_nonfinite='skip' cannot leave out an update"),
    ],
)
def test_what_cannot_be_done_is_refused_before_training(tmp_path, name, options, message):
    with pytest.raises(ValueError, match=message):
        train(tmp_path, name, **options)


@pytest.mark.parametrize("kind", [APOLLOAdamW, FiraAdamW])
def test_they_keep_the_promises_of_an_optimizer_in_the_backward(kind):
    def make(model):
        matrices = [p for p in model.parameters() if p.dim() == 2]
        others = [p for p in model.parameters() if p.dim() < 2]
        return kind([{"params": matrices, "rank": 2, "update_proj_gap": 2}, {"params": others}], 0.1, mode="immediate")

    check_in_backward(make)
