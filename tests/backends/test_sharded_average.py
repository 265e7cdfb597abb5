"""Average weights that are in shards, and scale losses over them: the numbers, files and ends of one process."""

import contextlib
import shutil
import sys

import pytest
import torch
from safetensors.torch import load_file
from shared.callbacks import Stop, StopAt
from test_numbers import ALONE, Network, Rows
from torch import nn
from variants import ONE_PROCESS, run_on, shared

from tr_core import Trainer, TrainingArguments
from tr_core.testing import WeightAverage
from tr_dist.fsdp import FSDP, Sharding
from tr_dist.testing import run_ranks, set_loss_scaler

UNITS = {"fsdp": "full_shard", "fsdp_config": {"transformer_layer_cls_to_wrap": ["Sequential"]}}


class Normed(Network):
    """Holds running statistics too, which no rank changes: what a norm would take in is its own samples."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.full((3,), 2.0))
        self.layers[0].bias.requires_grad_(False)

    def forward(self, x, labels=None):
        given = super().forward(x * self.scale[0], labels)
        if self.training and torch.is_grad_enabled():
            self.scale = self.scale * 1.01
        return given


def train(folder, options, total=12, stop_at=None, resume=None, strategy=None):
    """Run in every rank; returns the losses of evaluations, and the weights that are left."""
    rows = [dict(row, labels=row["labels"].clamp(min=0)) for row in Rows(48).rows]
    args = TrainingArguments(
        output_dir=folder,
        learning_rate=1e-2,
        logging_steps=1,
        disable_tqdm=True,
        log_level="error",
        eval_strategy="steps",
        eval_steps=2,
        **{
            "use_cpu": True, "optim": "sgd", "ema_decay": 0.8, "save_strategy": "no", "num_train_epochs": 2,
            "per_device_train_batch_size": total, **options,
        },
    )  # fmt: skip
    callbacks = [StopAt(stop_at)] if stop_at else []
    trainer = Trainer(Normed(), args, train_dataset=rows, eval_dataset=rows[:7], callbacks=callbacks, strategy=strategy)
    with contextlib.suppress(Stop):
        trainer.train(resume_from_checkpoint=resume)
    losses = [e["eval_loss"] for e in trainer.state.log_history if "eval_loss" in e]
    left = {k: v.detach().clone() for k, v in trainer.strategy.full_state_dict(trainer.model_wrapped).items()}
    trainer.save_model(f"{folder}/out")
    trainer.strategy.close()
    return losses, left


def assert_close(one, other):
    assert one[0] == pytest.approx(other[0], rel=1e-6, abs=1e-6)
    for name, value in one[1].items():
        torch.testing.assert_close(value, other[1][name], rtol=1e-6, atol=1e-6)


@pytest.mark.row("average")
@pytest.mark.parametrize("start", [0, 3])
def test_averages_in_shards_are_those_of_one_process(tmp_path, variant, start, record_property):
    if variant.startswith("zero_3"):
        with pytest.raises(Exception, match="ema_decay averages weights, of which layers.0.weight has none"):
            run_on(variant, train, 2, str(tmp_path), shared(variant, 12, 2))
        record_property("refused", "weights of ZeRO stage 3 are in no process whole")
        return
    alone = train(str(tmp_path / "1"), {"ema_start_step": start})
    raw = train(str(tmp_path / "raw"), {"ema_decay": None})
    assert raw[0] != pytest.approx(alone[0], rel=1e-4)
    world_size = 1 if variant in ONE_PROCESS else 2  # its buffer counts micro-batches
    options = {**shared(variant, 12, world_size), "ema_start_step": start}
    ranks = run_on(variant, train, 2, str(tmp_path / "2"), options)
    for rank in ranks:
        assert_close(rank, alone)
    exported, of_one = (load_file(tmp_path / n / "out" / "model.safetensors") for n in "21")
    assert exported.keys() == of_one.keys()
    for name, value in exported.items():
        assert torch.equal(value, ranks[0][1][name])
        torch.testing.assert_close(value, of_one[name], rtol=1e-6, atol=1e-6)


@pytest.mark.slow
@pytest.mark.column("fsdp")
@pytest.mark.row("average")
def test_averages_in_shards_resume_on_any_number_of_ranks(tmp_path):
    saves = {"save_strategy": "steps", "save_steps": 3}
    alone = train(str(tmp_path / "1"), saves)
    two = {**saves, **UNITS, "per_device_train_batch_size": 6}
    whole = run_ranks(train, 2, str(tmp_path / "a"), two, timeout_s=120)
    run_ranks(train, 2, str(tmp_path / "b"), two, 12, 5, timeout_s=120)
    shutil.copytree(tmp_path / "b", tmp_path / "c")
    again = run_ranks(train, 2, str(tmp_path / "b"), two, 12, None, True, timeout_s=120)
    assert again[0][0] == whole[0][0]
    assert all(torch.equal(value, whole[0][1][name]) for name, value in again[0][1].items())
    for world_size, form in ((1, ALONE), (3, UNITS), (2, {"strategy": "ddp"})):
        shutil.copytree(tmp_path / "c", folder := tmp_path / f"{world_size}-of-2")
        resized = {**saves, **form, "per_device_train_batch_size": 12 // world_size}
        for rank in run_ranks(train, world_size, str(folder), resized, 12, None, True, timeout_s=120):
            assert_close(rank, alone)


@pytest.mark.column("fsdp")
@pytest.mark.row("average")
def test_an_average_of_one_process_goes_on_in_shards(tmp_path):
    saves = {"save_strategy": "steps", "save_steps": 3}
    alone = train(str(tmp_path / "1"), saves)
    train(str(tmp_path / "2"), saves, stop_at=5)
    two = {**saves, "fsdp": "shard_grad_op", "per_device_train_batch_size": 6}
    for rank in run_ranks(train, 2, str(tmp_path / "2"), two, 12, None, True, timeout_s=120):
        assert_close(rank, alone)


def count_calls(layers):
    """Return how often an update of an average calls this package or torch, and how many of its weights are here."""
    with FSDP(Sharding(wrap="TRANSFORMER_BASED_WRAP", layer_classes=("Linear",)), use_cpu=True) as strategy:
        model = strategy.prepare(nn.Sequential(*(nn.Linear(4, 1, dtype=torch.bfloat16) for _ in range(layers))))
        average = WeightAverage(model, 0.5)
        before = {name: value.to_local().clone() for name, value in average.state_dict().items()}
        with torch.no_grad():
            torch._foreach_add_([p.to_local() for p in model.parameters()], 1.0)
        counted = []

        def count(frame, event, called):
            if event in ("call", "c_call") and "getattr" not in str(called):
                counted.append(frame.f_code.co_qualname)

        sys.setprofile(count)
        try:
            average.update()
        finally:
            sys.setprofile(None)
        held = 0
        for name, value in average.state_dict().items():
            held += value.to_local().numel() > 0
            assert torch.equal(value.to_local(), before[name].lerp(model.get_parameter(name).to_local().float(), 0.5))
        return len(counted), held


@pytest.mark.column("fsdp")
def test_an_update_of_many_shards_is_as_many_calls_as_of_few():
    few, many = (run_ranks(count_calls, 2, layers, timeout_s=60) for layers in (2, 12))
    assert [calls for calls, _ in few] == [calls for calls, _ in many]
    assert [held for _, held in many] == [24, 0]  # there is one row of each: the other rank has none


def train_scaled(folder, options, stop_at=None, resume=None):
    """Train with the loss scaler that float16 has on an accelerator."""
    strategy = FSDP(use_cpu=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=3)
    set_loss_scaler(strategy, scaler)
    result = train(folder, options, 12, stop_at, resume, strategy)
    return (*result, scaler.get_scale(), scaler.state_dict()["_growth_tracker"])


@pytest.mark.column("fsdp")
@pytest.mark.row("resume")
def test_the_scale_of_losses_is_resumed_with_the_shards(tmp_path):
    options = {"save_strategy": "steps", "save_steps": 3, "per_device_train_batch_size": 6, "ema_decay": None}
    whole = run_ranks(train_scaled, 2, str(tmp_path / "a"), options, timeout_s=120)
    run_ranks(train_scaled, 2, str(tmp_path / "b"), options, 5, timeout_s=120)
    resumed = run_ranks(train_scaled, 2, str(tmp_path / "b"), options, None, True, timeout_s=120)
    assert whole[0][2:] == (2.0**10, 2)
    for one, other in zip(resumed, whole, strict=True):
        assert (one[0], one[2:]) == (other[0], other[2:])
        assert all(torch.equal(value, other[1][name]) for name, value in one[1].items())
