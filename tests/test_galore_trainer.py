"""GaLore in the Trainer: with accumulation, clipping, schedules, checkpointing, resume, and left-out steps."""

import logging

import pytest
import torch
from shared.callbacks import KeepWeights
from shared.models import Tied
from shared.results import distance, logged, weights
from torch import nn

from tr_core import SingleDevice, Trainer, TrainerCallback, TrainingArguments
from tr_core.testing import set_loss_scaler

NAMES = ["galore_adamw", "galore_adafactor"]


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.LayerNorm(16)
        self.self_attn = nn.Linear(16, 24)
        self.mlp = nn.Sequential(nn.Linear(24, 32), nn.GELU(), nn.Dropout(self.dropout), nn.Linear(32, 8))

    dropout = 0.0

    def forward(self, x, labels):
        out = self.mlp(self.self_attn(self.norm(x)))
        return {"loss": (out - labels).square().mean(), "logits": out}


class Dropping(Network):
    dropout = 0.2


def rows(number=64, bad=()):
    generator = torch.Generator().manual_seed(0)
    made = [
        {"x": torch.randn(16, generator=generator), "labels": torch.randn(8, generator=generator)}
        for _ in range(number)
    ]
    for index in bad:
        made[index]["x"][0] = float("nan")
    return made


def words(number=32):
    generator = torch.Generator().manual_seed(0)
    tokens = [torch.randint(20, (6,), generator=generator) for _ in range(number)]
    return [{"x": row, "labels": row} for row in tokens]


def trainer_of(folder, *, model=None, data=None, callbacks=(), trainer_class=Trainer, **options):
    options = {
        "optim": "galore_adamw_layerwise",
        "optim_target_modules": ["attn", "mlp"],
        "optim_args": "rank=4, update_proj_gap=3, scale=1.0",
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
    return trainer_class(model or Network(), args, train_dataset=data or rows(), callbacks=list(callbacks))


def train(folder, *, resume=None, **options):
    trainer = trainer_of(folder, **options)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("options", [{}, {"bf16": True}, {"lr_scheduler_type": "cosine", "warmup_steps": 3}])
def test_layerwise_gives_the_same_bits_with_one_batch_a_step(tmp_path, name, options):
    step = train(tmp_path, optim=name, **options)
    layerwise = train(tmp_path, optim=f"{name}_layerwise", **options)
    assert torch.equal(weights(step), weights(layerwise))
    for key in ("loss", "learning_rate"):
        assert logged(step, key) == logged(layerwise, key)
    assert logged(step, "grad_norm") == pytest.approx(logged(layerwise, "grad_norm"), rel=1e-6)


def test_the_learning_rate_that_is_logged_is_the_one_that_is_used(tmp_path):
    class Used(TrainerCallback):
        rates: list[float] = []

        def on_pre_optimizer_step(self, args, state, control, **kwargs):
            self.rates.append(kwargs["optimizer"].param_groups[0]["lr"])

    used = Used()
    trainer = train(tmp_path, callbacks=[used])
    assert logged(trainer, "learning_rate") == used.rates
    assert len(set(used.rates)) == 10
    frozen = train(tmp_path, lr_scheduler_type="constant_with_warmup", warmup_steps=100, max_steps=1)
    assert torch.equal(weights(frozen), torch.cat([p.detach().flatten() for p in Network().parameters()]))


@pytest.mark.parametrize("name", NAMES)
def test_micro_batches_add_up_to_one_batch(tmp_path, name):
    one = train(tmp_path, optim=name, max_grad_norm=0)
    accumulated = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "max_grad_norm": 0}
    four = train(tmp_path, optim=f"{name}_layerwise", **accumulated)
    assert distance(one, four) < 1e-6
    immediate = {"optim_args": "rank=4, update_proj_gap=3, scale=1.0, mode=immediate", **accumulated}
    assert distance(one, train(tmp_path, optim=f"{name}_layerwise", **immediate)) < 1e-6


def test_clipping_is_that_of_the_strategy(tmp_path):
    step = train(tmp_path, optim="galore_adamw", max_grad_norm=0.3)
    layerwise = train(tmp_path, max_grad_norm=0.3)
    assert distance(step, train(tmp_path, optim="galore_adamw", max_grad_norm=0)) > 1e-4
    assert distance(step, layerwise) < 1e-6
    assert logged(step, "grad_norm") == pytest.approx(logged(layerwise, "grad_norm"), rel=1e-6)


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
        "galore_adamw_layerwise projects 3 matrices with 1,408 of 1,504 trainable numbers: self_attn, mlp.0, mlp.3"
        in (caplog.text)
    )


@pytest.mark.parametrize("name", [name + suffix for name in NAMES for suffix in ("", "_layerwise")])
@pytest.mark.parametrize("options", [{}, {"bf16": True, "gradient_accumulation_steps": 2}])
def test_a_run_resumed_after_any_step_gives_the_same_bits(tmp_path, name, options):
    options = {"optim": name, "max_steps": 7, "per_device_train_batch_size": 4, **options}
    whole = train(tmp_path / "whole", model=Dropping(), save_strategy="steps", save_steps=1, **options)
    for step in range(1, 7):
        resumed = train(
            tmp_path / "other", model=Dropping(), resume=str(tmp_path / f"whole/checkpoint-{step}"), **options
        )
        assert torch.equal(weights(whole), weights(resumed)), step


def test_a_resumed_run_may_change_the_rank(tmp_path):
    train(tmp_path, max_steps=4, save_strategy="steps", save_steps=4)
    optim_args = "rank=6, update_proj_gap=3, scale=1.0"
    resumed = train(tmp_path, max_steps=8, optim_args=optim_args, resume=True)
    ranks = {s["basis_left"].shape[-1] for s in resumed.optimizer.state.values() if "basis_left" in s}
    assert ranks | {s["basis_right"].shape[-1] for s in resumed.optimizer.state.values() if "basis_right" in s} == {6}


def test_hooks_are_off_after_training_however_it_ends(tmp_path):
    class Stop(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step == 2:
                raise KeyError("on purpose")

    done = train(tmp_path, max_steps=2)
    failing = trainer_of(tmp_path, callbacks=[Stop()])
    with pytest.raises(KeyError, match="on purpose"):
        failing.train()
    for trainer in (done, failing):
        assert not any(p._post_accumulate_grad_hooks for p in trainer.model.parameters())
        assert type(trainer.strategy) is SingleDevice
        assert all(p.grad is None for p in trainer.model.parameters())


def test_a_second_training_on_the_same_model_updates_each_parameter_once(tmp_path):
    model = Network()
    train(tmp_path, model=model, max_steps=3)
    again = train(tmp_path, model=model, max_steps=3)
    other = Network()
    train(tmp_path, model=other, optim="galore_adamw", max_steps=3)
    assert torch.equal(weights(again), weights(train(tmp_path, model=other, optim="galore_adamw", max_steps=3)))


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_activation_checkpointing_of_shared_weights_changes_nothing(tmp_path, reentrant, accumulation):
    common = {"data": words(), "optim_target_modules": "all-linear", "max_steps": 6, "max_grad_norm": 0.5}
    plain = train(tmp_path, model=Tied(), optim="galore_adamw", **common)
    checkpointing = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": reentrant}}
    if accumulation > 1:
        common.update(max_grad_norm=0)
        plain = train(tmp_path, model=Tied(), optim="galore_adamw", **common)
    size = {"per_device_train_batch_size": 8 // accumulation, "gradient_accumulation_steps": accumulation}
    layerwise = train(tmp_path, model=Tied(), **common, **checkpointing, **size)
    assert distance(plain, layerwise) < 1e-6


def test_steps_that_are_not_finite_are_left_out(tmp_path):
    common = {"data": rows(bad=[5, 23]), "on_nonfinite": "skip", "seed": 3}
    step = train(tmp_path, optim="galore_adamw", **common)
    layerwise = train(tmp_path, **common)
    assert sum(logged(layerwise, "skipped_steps")) >= 2
    assert weights(layerwise).isfinite().all()
    assert torch.equal(weights(step), weights(layerwise))


def test_steps_that_are_not_finite_end_the_run_where_that_is_asked_for(tmp_path):
    with pytest.raises(FloatingPointError, match="the loss is nan"):
        train(tmp_path, data=rows(bad=range(8, 64)), on_nonfinite="raise", logging_steps=2)


def test_immediate_updates_cannot_be_left_out(tmp_path):
    optim_args = "rank=4, mode=immediate"
    with pytest.raises(ValueError, match="on_nonfinite='skip' cannot leave out an update of GaLoreAdamW"):
        train(tmp_path, optim_args=optim_args, on_nonfinite="skip", max_grad_norm=0)


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


def test_biases_and_norms_are_not_decayed(tmp_path):
    trainer = train(tmp_path, max_steps=1)
    decayed = {id(p) for group in trainer.optimizer.param_groups if group["weight_decay"] for p in group["params"]}
    names = {name for name, p in trainer.model.named_parameters() if id(p) in decayed}
    assert names == {"self_attn.weight", "mlp.0.weight", "mlp.3.weight"}
    assert trainer.optimizer.param_groups[0]["betas"] == (0.9, 0.999)


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
        ({"optim_args": "rank=4.5"}, "rank='4.5' of galore_adamw_layerwise needs a whole number"),
        ({"optim_args": "rank=0"}, "rank=0 must be a whole number from 1"),
        ({"optim_args": "proj_type=up"}, "proj_type='up' is not known"),
        ({"optim_args": "mode=step"}, "mode='step' of galore_adamw_layerwise is galore_adamw; use that name"),
        ({"optim_args": "mode=immediate"}, "max_grad_norm=1 cannot be held with optim_args='mode=immediate'"),
        ({"optim": "galore_adamw", "optim_args": "mode=deferred"}, "galore_adamw does not take 'mode'"),
        ({"optim": "adamw_torch", "optim_args": None}, "has no effect on optim='adamw_torch', which updates all"),
        ({"optim": "adafactor", "optim_args": None}, "has no effect on optim='adafactor'"),
        (
            {"accelerator_config": {"gradient_accumulation_kwargs": {"sync_each_batch": True}}},
            "sync_each_batch=True cannot be used with optim='galore_adamw_layerwise'",
        ),
    ],
)
def test_what_cannot_be_done_is_refused_before_training(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        train(tmp_path, **options)
