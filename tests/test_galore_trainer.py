"""Projections and 8-bit moments in the Trainer: what `test_optimizers_in_trainer.py` does not ask of all."""

import logging

import pytest
import torch
from shared.callbacks import KeepWeights
from shared.results import distance, logged, weights
from torch import nn

from tr_core import SingleDevice, Trainer, TrainingArguments
from tr_core.testing import set_loss_scaler
from tr_dist.testing import run_ranks

NAMES = ["galore_adamw", "galore_adafactor"]
GALORE = "rank=4, update_proj_gap=3, scale=1.0"
WHOLE = {"optim_target_modules": None}
EIGHT_BITS = {
    "adamw_8bit": {"optim": "adamw_8bit", "optim_args": "min_8bit_size=256", **WHOLE},
    **{
        name: {"optim": name, "optim_args": f"{GALORE}, min_8bit_size=256"}
        for name in ("galore_adamw_8bit", "galore_adamw_8bit_layerwise")
    },
}


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.LayerNorm(16)
        self.self_attn = nn.Linear(16, 24)
        self.mlp = nn.Sequential(nn.Linear(24, 32), nn.GELU(), nn.Linear(32, 8))

    def forward(self, x, labels):
        out = self.mlp(self.self_attn(self.norm(x)))
        return {"loss": (out - labels).square().mean(), "logits": out}


def rows(number=64, bad=()):
    generator = torch.Generator().manual_seed(0)
    made = [
        {"x": torch.randn(16, generator=generator), "labels": torch.randn(8, generator=generator)}
        for _ in range(number)
    ]
    for index in bad:
        made[index]["x"][0] = float("nan")
    return made


def trainer_of(folder, *, model=None, data=None, callbacks=(), **options):
    options = {
        "optim": "galore_adamw_layerwise",
        "optim_target_modules": ["attn", "mlp"],
        "optim_args": GALORE,
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


def train(folder, *, resume=None, **options):
    trainer = trainer_of(folder, **options)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def test_an_estimated_norm_is_said_to_be_one_once(tmp_path, caplog):
    with caplog.at_level(logging.INFO):
        exact = train(tmp_path, log_level="info")
        assert "grad_norm is an estimate" not in caplog.text
        options = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
        estimated = train(tmp_path, log_level="info", **options)
    assert caplog.text.count("grad_norm is an estimate") == 1
    assert logged(exact, "grad_norm")[0] == pytest.approx(logged(estimated, "grad_norm")[0], rel=1e-5)
    assert logged(exact, "grad_norm") == pytest.approx(logged(estimated, "grad_norm"), rel=0.15)


def test_what_is_projected_is_logged(tmp_path, caplog):
    with caplog.at_level(logging.INFO, logger="tr_optim"):
        train(tmp_path, max_steps=1)
    assert (
        "galore_adamw_layerwise projects 3 matrices with 1,408 of 1,504 trainable numbers: self_attn, mlp.0, mlp.2"
        in (caplog.text)
    )


def test_a_resumed_run_may_change_the_rank(tmp_path):
    train(tmp_path, max_steps=4, save_strategy="steps", save_steps=4)
    optim_args = "rank=6, update_proj_gap=3, scale=1.0"
    resumed = train(tmp_path, max_steps=8, optim_args=optim_args, resume=True)
    ranks = {s["basis_left"].shape[-1] for s in resumed.optimizer.state.values() if "basis_left" in s}
    assert ranks | {s["basis_right"].shape[-1] for s in resumed.optimizer.state.values() if "basis_right" in s} == {6}


def test_a_second_training_on_the_same_model_updates_each_parameter_once(tmp_path):
    model = Network()
    train(tmp_path, model=model, max_steps=3)
    again = train(tmp_path, model=model, max_steps=3)
    other = Network()
    train(tmp_path, model=other, optim="galore_adamw", max_steps=3)
    assert torch.equal(weights(again), weights(train(tmp_path, model=other, optim="galore_adamw", max_steps=3)))


class Overflowing(Network):
    def __init__(self, step):
        super().__init__()
        self.calls, self.step = 0, step

    def forward(self, x, labels):
        outputs = super().forward(x, labels)
        self.calls += 1
        if self.calls == self.step:
            outputs["loss"] = outputs["loss"] * 1e38  # times the scale that is infinite
        return outputs


@pytest.mark.parametrize("name", [*NAMES, "galore_adamw_8bit"])
@pytest.mark.parametrize("step", [2, 3, 4, 5])  # bases are found in all of them but one
def test_a_step_that_overflows_under_loss_scaling_leaves_everything_untouched(tmp_path, name, step):
    runs = {}
    for optim in (name, f"{name}_layerwise"):
        keep = KeepWeights()
        trainer = trainer_of(tmp_path, model=Overflowing(step), optim=optim, max_steps=6, callbacks=[keep])
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        trainer.strategy = set_loss_scaler(SingleDevice("cpu"), scaler)
        trainer.train()
        assert keep.applied == [number != step for number in range(1, 7)]
        assert torch.equal(keep.weights[step - 2], keep.weights[step - 1])
        assert len(keep.states[step - 2]) == len(keep.states[step - 1]) > 0
        assert all(map(torch.equal, keep.states[step - 2], keep.states[step - 1]))
        assert scaler.get_scale() == 512.0
        runs[optim] = weights(trainer)
    assert (runs[name] - runs[f"{name}_layerwise"]).abs().max() < 1e-6


@pytest.mark.parametrize("name", [*NAMES, "galore_adamw_8bit"])
def test_a_first_step_that_overflows_begins_no_state(tmp_path, name):
    for optim in (name, f"{name}_layerwise"):
        keep = KeepWeights()
        trainer = trainer_of(tmp_path, model=Overflowing(1), optim=optim, max_steps=3, callbacks=[keep])
        trainer.strategy = set_loss_scaler(SingleDevice("cpu"), torch.amp.GradScaler("cpu", init_scale=1024.0))
        trainer.train()
        assert keep.applied == [False, True, True]
        assert keep.states[0] == []
        assert torch.equal(keep.weights[0], torch.cat([p.detach().flatten() for p in Network().parameters()]))
        assert {int(state["step"]) for state in trainer.optimizer.state.values()} == {2}


def test_rules_may_give_parameters_a_rank_of_their_own(tmp_path):
    rules = [{"params": "mlp", "rank": 2, "learning_rate": 1e-3}]
    trainer = train(tmp_path, parameter_rules=rules, max_steps=2)
    state = trainer.optimizer.state
    assert state[trainer.model.mlp[0].weight]["basis_right"].shape[-1] == 2
    assert state[trainer.model.self_attn.weight]["basis_right"].shape[-1] == 4
    with pytest.raises(ValueError, match="rule 'norm' of parameter_rules sets rank, but none of its parameters is"):
        train(tmp_path, parameter_rules=[{"params": "norm", "rank": 2}])


def test_a_step_is_made_again_with_smaller_micro_batches_where_memory_runs_out(tmp_path):
    class Greedy(Network):
        def forward(self, x, labels):
            outputs = super().forward(x, labels)
            if len(x) > 4:
                outputs["loss"].register_hook(self.fail)
            return outputs

        def fail(self, gradient):
            raise torch.OutOfMemoryError("CUDA out of memory.")

    found = train(tmp_path, model=Greedy(), auto_find_batch_size=True, max_grad_norm=0)
    assert found.state.train_batch_size == 4
    assert distance(found, train(tmp_path, max_grad_norm=0)) < 1e-6


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"optim_target_modules": None}, "optim_target_modules names, and it is None; give names such as"),
        ({"optim_target_modules": ["attention"]}, "target module 'attention' stands for no matrix"),
        ({"optim_args": "rnk=4"}, "galore_adamw_layerwise does not take 'rnk'.* did you mean rank?"),
        ({"optim_args": "rank=4.5"}, "rank=4.5 of galore_adamw_layerwise needs a whole number"),
        ({"optim_args": "rank=0"}, "rank=0 must be a whole number from 1"),
        ({"optim_args": "proj_type=up"}, "proj_type='up' is not known"),
        ({"optim_args": "mode=step"}, "mode='step' of galore_adamw_layerwise is galore_adamw; use that name"),
        ({"optim_args": "mode=immediate"}, "max_grad_norm=1 cannot be held with optim_args='mode=immediate'"),
        ({"optim": "galore_adamw", "optim_args": "mode=deferred"}, "galore_adamw does not take 'mode'"),
        ({"optim": "adamw_torch", "optim_args": None}, "has no effect on optim='adamw_torch', which updates all"),
        ({"optim": "adafactor", "optim_args": None}, "has no effect on optim='adafactor'"),
        ({"optim": "apollo_adamw", "optim_target_modules": None}, "optim_target_modules names, and it is None"),
        ({"optim": "apollo_adamw_layerwise", "optim_args": "mode=deferred"}, "apollo_adamw_layerwise does not take 'm"),
        ({"optim": "fira_adamw", "optim_args": "proj=random"}, "fira_adamw does not take 'proj'"),
        ({"optim": "apollo_adamw", "optim_args": "scale_type=row"}, "scale_type='row' is not known"),
        ({"optim": "fira_adamw", "optim_args": "norm_growth=0.5"}, "norm_growth=0.5 must be at least 1"),
        ({"optim": "fira_adamw_layerwise", "on_nonfinite": "skip"}, "on_nonfinite='skip' cannot leave out an update"),
        (
            {"optim_args": "rank=4, mode=immediate", "on_nonfinite": "skip", "max_grad_norm": 0},
            "on_nonfinite='skip' cannot leave out an update of GaLoreAdamW",
        ),
        (
            {"optim": "lomo", "optim_args": "nonfinite=skip_tensor", "on_nonfinite": "skip", **WHOLE},
            "on_nonfinite='skip' cannot leave out an update of Lomo",
        ),
        (
            {"optim": "adalomo", "optim_args": None, "gradient_accumulation_steps": 2, **WHOLE},
            "with gradient_accumulation_steps=2: adalomo applies and frees.*gradient_checkpointing",
        ),
        ({"optim": "adamw_8bit", **WHOLE}, "adamw_8bit does not take 'rank'"),
        (
            {"optim": "adamw_8bit", "optim_args": "min_8bit_size=few", **WHOLE},
            "min_8bit_size='few' of adamw_8bit needs a number",
        ),
        (
            {"optim": "adamw_8bit", "optim_args": "min_8bit_size=-1", **WHOLE},
            "min_8bit_size=-1 must be a whole number from 0",
        ),
        ({"optim": "adamw_8bit", "optim_args": None}, "has no effect on optim='adamw_8bit'"),
        ({"optim": "galore_adamw", "optim_args": "min_8bit_size=0"}, "galore_adamw does not take 'min_8bit_size'"),
        (
            {"accelerator_config": {"gradient_accumulation_kwargs": {"sync_each_batch": True}}},
            "sync_each_batch=True cannot be used with optim='galore_adamw_layerwise'",
        ),
    ],
)
def test_what_cannot_be_done_is_refused_before_training(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        train(tmp_path, **options)


# APOLLO and Fira


def test_layerwise_clips_to_the_norm_of_the_arguments_and_says_at_what_cost(tmp_path, caplog):
    with caplog.at_level(logging.INFO, logger="tr_optim"):
        clipped = train(tmp_path, optim="fira_adamw_layerwise", max_grad_norm=0.3, log_level="info")
    told = (
        "fira_adamw_layerwise clips to max_grad_norm=0.3 by a second backward pass of each step's last micro-batch; "
        "max_grad_norm=0 saves it, and norm_growth=1.01 limits updates anyway"
    )
    assert caplog.text.count(told) == 1
    assert "fira_adamw_layerwise projects 3 matrices" in caplog.text
    assert distance(clipped, train(tmp_path, optim="fira_adamw", max_grad_norm=0.3)) < 1e-6
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="tr_optim"):
        free = train(tmp_path, optim="fira_adamw_layerwise", max_grad_norm=0, log_level="info")
    assert "second backward" not in caplog.text
    assert distance(clipped, free) > 1e-6


def test_the_options_that_transformers_has_for_apollo_are_taken(tmp_path):
    given = "rank=2,proj=random,scale_type=tensor,scale=128,update_proj_gap=5,proj_type=std"
    trained = train(tmp_path, optim="apollo_adamw_layerwise", optim_args=given)
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
    mini = train(tmp_path, optim="apollo_mini", optim_args=None)
    apollo = train(tmp_path, optim="apollo_adamw", optim_args="rank=1,scale_type=tensor,scale=128")
    assert torch.equal(weights(mini), weights(apollo))
    assert mini.optimizer.state[mini.model.self_attn.weight]["exp_avg"].numel() == 24


# Moments in 8 bits


@pytest.mark.parametrize(
    "options", [{"optim": "galore_adamw"}, *EIGHT_BITS.values()], ids=lambda options: options["optim"]
)
def test_decay_betas_and_eps_are_those_of_the_run(tmp_path, options):
    own = {"adam_beta1": 0.8, "adam_beta2": 0.95, "adam_epsilon": 1e-6}
    trainer = trainer_of(tmp_path, **options, **own)
    groups = trainer.create_optimizer().param_groups
    assert {(group["betas"], group["eps"]) for group in groups} == {((0.8, 0.95), 1e-6)}
    decayed = {id(p) for group in groups if group["weight_decay"] for p in group["params"]}
    names = {name for name, p in trainer.model.named_parameters() if id(p) in decayed}
    assert names == {"self_attn.weight", "mlp.0.weight", "mlp.2.weight"}  # no bias, no norm
    assert {group["weight_decay"] for group in groups} == {0.1, 0.0}


def test_rules_may_keep_float32_moments_of_some_parameters(tmp_path):
    rules = [{"params": "mlp.0", "min_8bit_size": 10**9}]
    trainer = train(tmp_path, **EIGHT_BITS["adamw_8bit"], parameter_rules=rules, max_steps=2)
    mlp, state = trainer.model.mlp, trainer.optimizer.state
    assert state[mlp[0].weight]["exp_avg"].dtype == torch.float32
    assert state[mlp[2].weight]["exp_avg"].dtype == torch.int8


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"optim": "adamw_torch", "optim_args": None, **WHOLE}, EIGHT_BITS["adamw_8bit"]),
        (EIGHT_BITS["galore_adamw_8bit"], {"optim": "galore_adamw"}),
    ],
)
def test_a_run_with_other_moments_is_not_resumed_in_silence(tmp_path, first, second):
    train(tmp_path, **first, max_steps=2, save_strategy="steps", save_steps=2)
    with pytest.raises(ValueError, match=r"AdamW"):
        train(tmp_path, **second, max_steps=4, resume=True)


def train_on_rank(folder, name, options, resume=None):
    trainer = train(folder, resume=resume, max_grad_norm=0, **EIGHT_BITS[name], **options)
    whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in trainer.model.parameters()]
    trainer.strategy.close()
    return torch.cat([tensor.detach().flatten() for tensor in whole])


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (not name.endswith("layerwise"))) for name in EIGHT_BITS],
)
def test_shards_resume_with_the_same_bits_and_on_other_numbers_of_ranks(tmp_path, name):
    shards = {"per_device_train_batch_size": 4, "fsdp": "full_shard"}
    saving = {**shards, "save_strategy": "steps", "save_steps": 3}
    whole = run_ranks(train_on_rank, 2, str(tmp_path / "whole"), name, saving)[0]
    folder = str(tmp_path / "whole/checkpoint-3")
    assert torch.equal(run_ranks(train_on_rank, 2, str(tmp_path / "again"), name, shards, folder)[0], whole)
    moved = (whole - torch.cat([p.detach().flatten() for p in Network().parameters()])).norm()
    four = run_ranks(train_on_rank, 4, str(tmp_path / "4"), name, {**shards, "per_device_train_batch_size": 2}, folder)
    alone = train_on_rank(str(tmp_path / "1"), name, {"per_device_train_batch_size": 8}, folder)
    for found in (four[0], alone):
        assert (found - whole).norm() < 1e-3 * moved
