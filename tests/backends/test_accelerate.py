"""An Accelerator that a user built trains here: with its precision, wrapper and plugins, and stays the user's."""

import atexit
import os
import sys
from pathlib import Path

import pytest
import torch
from scripts_in_ranks import run_script
from test_numbers import ALONE, Network, Rows, assert_close, assert_same_bits, train
from torch import nn

from tr_core import Trainer, TrainingArguments
from tr_core.testing import check_strategy
from tr_dist.accelerate_strategy import AcceleratorStrategy
from tr_dist.testing import run_ranks

accelerate = pytest.importorskip("accelerate")

pytestmark = [pytest.mark.column("accelerate"), pytest.mark.slow]
TIME_LIMIT_S = 120


def fresh():
    """Forget the Accelerators of earlier tests: their state is the process's."""
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    os.environ.pop("ACCELERATE_USE_FSDP", None)


@pytest.fixture(autouse=True)
def forgotten():
    fresh()
    yield
    fresh()


def joined(**options):
    """Return an Accelerator of this rank, in a group that meets through a file."""
    meet = Path(os.environ["TR_RENDEZVOUS_FILE"]).as_uri()
    handlers = [accelerate.InitProcessGroupKwargs(init_method=meet)]
    return accelerate.Accelerator(cpu=True, kwargs_handlers=handlers, **options)


def sharded(precision="no", **plugin):
    """Return an Accelerator with an FSDP2 plugin on the CPU, where accelerate itself takes plugins for GPUs only.

    What it then calls, torch's `fully_shard`, works on the CPU.
    """
    accelerator = joined(mixed_precision=precision)
    accelerator.state.fsdp_plugin = accelerate.FullyShardedDataParallelPlugin(fsdp_version=2, **plugin)
    accelerator.state.distributed_type = accelerate.DistributedType.FSDP
    if precision != "no":
        accelerator.state.fsdp_plugin.set_mixed_precision(precision)
    assert accelerator.is_fsdp2
    return accelerator


def scaled():
    """Return an Accelerator with a loss scaler, which accelerate gives to devices other than the CPU."""
    accelerator = joined()
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    return accelerator


UNITS = {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": ["Sequential"]}
KINDS = {
    "alone": lambda: accelerate.Accelerator(cpu=True),
    "replicas": joined,
    "bf16": lambda: joined(mixed_precision="bf16"),
    "shards": sharded,
    "units": lambda: sharded(**UNITS),
    "units, bf16": lambda: sharded("bf16", **UNITS),
    "kept": lambda: sharded(reshard_after_forward=False),
    "whole": lambda: sharded(state_dict_type="FULL_STATE_DICT"),
    "recomputed": lambda: sharded(activation_checkpointing=True, **UNITS),
    "scaled": scaled,
    "compiled": lambda: joined(dynamo_backend="eager"),
}


def keep_promises(kind):
    accelerator = KINDS[kind]()
    strategy = AcceleratorStrategy(accelerator)
    assert strategy.accelerator is accelerator
    check_strategy(strategy)
    strategy.close()


@pytest.mark.row("promises")
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("kind", ["replicas", "shards", "whole", "scaled"])
def test_an_adopted_accelerator_keeps_the_promises_of_a_strategy(kind, world_size):
    run_ranks(keep_promises, world_size, kind, timeout_s=TIME_LIMIT_S)


@pytest.mark.row("promises")
def test_an_accelerator_without_a_launcher_keeps_the_promises_of_a_strategy():
    strategy = AcceleratorStrategy(accelerate.Accelerator(cpu=True))
    check_strategy(strategy)
    strategy.close()


ADAM = {"optim": "adamw_torch", "save_strategy": "steps", "save_steps": 3, "gradient_accumulation_steps": 2}
TWO = {**ADAM, "per_device_train_batch_size": 3}
DDP = {**TWO, "strategy": "ddp"}


def train_with(kind, folder, options, *rest):
    """Run in every rank."""
    return train(folder, "Network", 40, options, *rest, strategy=AcceleratorStrategy(KINDS[kind]()))


@pytest.fixture(scope="module")
def by_ddp(tmp_path_factory):
    return run_ranks(train, 2, str(tmp_path_factory.mktemp("ddp")), "Network", 40, DDP, timeout_s=TIME_LIMIT_S)


@pytest.mark.parametrize("kind", ["replicas", "compiled"])
def test_replicas_of_an_accelerator_train_with_the_bits_of_ddp(tmp_path, by_ddp, kind):
    ranks = run_ranks(train_with, 2, kind, str(tmp_path), TWO, timeout_s=TIME_LIMIT_S)
    for one, other in zip(ranks, by_ddp, strict=True):
        assert_same_bits(one, other)


def test_the_strategy_by_its_name_trains_with_the_bits_of_ddp(tmp_path, by_ddp):
    options = {**TWO, "strategy": "accelerate"}
    ranks = run_ranks(train, 2, str(tmp_path), "Network", 40, options, timeout_s=TIME_LIMIT_S)
    for one, other in zip(ranks, by_ddp, strict=True):
        assert_same_bits(one, other)


@pytest.mark.parametrize("kind", ["units", "kept", "recomputed", "scaled"])
def test_shards_of_an_accelerator_train_to_the_loss_of_ddp(tmp_path, by_ddp, kind):
    ranks = run_ranks(train_with, 2, kind, str(tmp_path), TWO, timeout_s=TIME_LIMIT_S)
    assert_close(ranks[0], by_ddp[0], 1e-5)  # Adam divides by the root of small gradients


@pytest.mark.row("bf16")
def test_bfloat16_of_an_accelerator_is_that_of_ddp(tmp_path):
    ddp = run_ranks(train, 2, str(tmp_path / "1"), "Network", 40, {**DDP, "bf16": True}, timeout_s=TIME_LIMIT_S)
    ranks = run_ranks(train_with, 2, "bf16", str(tmp_path / "2"), TWO, timeout_s=TIME_LIMIT_S)
    for one, other in zip(ranks, ddp, strict=True):
        assert_same_bits(one, other)


@pytest.mark.row("bf16")
def test_bfloat16_in_shards_trains_to_the_loss_of_ddp(tmp_path, by_ddp):
    ranks = run_ranks(train_with, 2, "units, bf16", str(tmp_path), TWO, timeout_s=TIME_LIMIT_S)
    assert_close(ranks[0], by_ddp[0], 5e-2)
    assert ranks[0][0] != by_ddp[0][0]


def test_an_accelerator_of_one_process_trains_with_the_bits_of_a_single_device(tmp_path):
    single = train(str(tmp_path / "1"), "Network", 40, {**TWO, **ALONE})
    assert_same_bits(train_with("alone", str(tmp_path / "2"), TWO), single)


@pytest.mark.slow
@pytest.mark.row("resume")
@pytest.mark.parametrize("kind", ["replicas", "bf16", "units", "units, bf16", "whole", "scaled"])
def test_a_run_with_an_accelerator_resumes_bit_for_bit(tmp_path, kind):
    whole = run_ranks(train_with, 2, kind, str(tmp_path / "a"), TWO, timeout_s=TIME_LIMIT_S)
    run_ranks(train_with, 2, kind, str(tmp_path / "b"), TWO, 8, timeout_s=TIME_LIMIT_S)
    resumed = run_ranks(train_with, 2, kind, str(tmp_path / "b"), TWO, None, True, timeout_s=TIME_LIMIT_S)
    for one, other in zip(whole, resumed, strict=True):
        assert_same_bits(one, other)


def train_with_own_optimizer(folder):
    """Train in shards with an optimizer that was built over the whole parameters."""
    strategy, model = AcceleratorStrategy(sharded(**UNITS)), Network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    optimizers = (optimizer, torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.5, 20))
    rows = [dict(row, labels=row["labels"].clamp(min=0)) for row in Rows(24).rows]
    args = TrainingArguments(folder, use_cpu=True, save_strategy="no", disable_tqdm=True, log_level="error")
    trainer = Trainer(model, args, train_dataset=rows, optimizers=optimizers, strategy=strategy)
    trainer.train()
    again = trainer.train()  # in the same Accelerator
    weights = {name: value.clone() for name, value in strategy.full_state_dict(trainer.model_wrapped).items()}
    strategy.close()
    return again.training_loss, weights


def train_with_own_optimizer_by_ddp(folder):
    model = Network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    optimizers = (optimizer, torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.5, 20))
    rows = [dict(row, labels=row["labels"].clamp(min=0)) for row in Rows(24).rows]
    args = TrainingArguments(
        folder, use_cpu=True, save_strategy="no", disable_tqdm=True, log_level="error", strategy="ddp"
    )
    trainer = Trainer(model, args, train_dataset=rows, optimizers=optimizers)
    trainer.train()
    again = trainer.train()
    weights = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    trainer.strategy.close()
    return again.training_loss, weights


def test_an_optimizer_that_was_built_before_the_shards_trains_them(tmp_path):
    ddp = run_ranks(train_with_own_optimizer_by_ddp, 2, str(tmp_path / "1"), timeout_s=TIME_LIMIT_S)
    ranks = run_ranks(train_with_own_optimizer, 2, str(tmp_path / "2"), timeout_s=TIME_LIMIT_S)
    assert ranks[0][0] == pytest.approx(ddp[0][0], rel=1e-5)
    for name, value in ranks[0][1].items():
        torch.testing.assert_close(value, ddp[0][1][name], rtol=1e-5, atol=1e-5)
    start = Network().state_dict()
    assert not any(torch.equal(value, start[name]) for name, value in ranks[0][1].items())


def bind_with_a_state():
    strategy, model = AcceleratorStrategy(sharded()), Network()
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    wrapped = strategy.prepare(model)
    with pytest.raises(ValueError, match=r"AdamW has a state of whole parameters, .* made no step"):
        strategy.bind_optimizer(wrapped, optimizer)
    strategy.close()


@pytest.mark.row("refused")
def test_an_optimizer_with_a_state_of_whole_parameters_is_refused():
    run_ranks(bind_with_a_state, 2, timeout_s=TIME_LIMIT_S)


def lone(**options):
    return AcceleratorStrategy(accelerate.Accelerator(cpu=True, **options))


class Watching(Trainer):
    """Keeps what the Accelerator says in each micro-batch."""

    def training_step(self, *inputs, **options):
        self.said = [*getattr(self, "said", []), self.strategy.accelerator.sync_gradients]
        return super().training_step(*inputs, **options)


def test_the_loop_decides_which_micro_batch_ends_a_step_and_the_accelerator_says_so(tmp_path):
    strategy = lone()
    args = TrainingArguments(
        tmp_path, use_cpu=True, save_strategy="no", disable_tqdm=True, log_level="error", max_steps=2,
        per_device_train_batch_size=2, gradient_accumulation_steps=3,
    )  # fmt: skip
    trainer = Watching(Network(), args, train_dataset=Rows(24).rows, strategy=strategy)
    trainer.train()
    assert trainer.said == [False, False, True] * 2
    accelerator = strategy.accelerator
    assert accelerator.unwrap_model(trainer.model_wrapped) is trainer.model
    assert [each.optimizer for each in accelerator._optimizers] == [trainer.optimizer]
    assert accelerator._models == [trainer.model_wrapped]
    strategy.close()


@pytest.mark.row("overflow")
def test_an_overflow_in_float16_skips_the_step_and_the_accelerator_says_so():
    accelerator = accelerate.Accelerator(cpu=True)
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    strategy = AcceleratorStrategy(accelerator)
    model = strategy.prepare(nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    strategy.bind_optimizer(model, optimizer)
    before = model.weight.detach().clone()
    for factor, applied in ((float("inf"), False), (1.0, True)):
        with strategy.accumulate(model, sync=True):
            strategy.backward(model(torch.ones(1, 2)).sum() * factor)
        assert strategy.step(optimizer) is applied
        assert accelerator.optimizer_step_was_skipped is not applied
        assert torch.equal(model.weight, before) is not applied
        optimizer.zero_grad()
    assert accelerator.scaler.get_scale() == 2.0
    assert strategy.state_parts(model, optimizer)["scaler"] is accelerator.scaler
    strategy.close()


def test_a_model_that_is_prepared_again_computes_in_one_context():
    strategy = lone(mixed_precision="bf16")
    model = nn.Linear(2, 1)
    for _ in range(3):
        wrapped = strategy.prepare(model)
    assert wrapped(torch.ones(1, 2)).dtype is torch.float32
    strategy.accelerator.unwrap_model(wrapped, keep_fp32_wrapper=False)
    assert model(torch.ones(1, 2)).dtype is torch.float32
    assert model.forward.__func__ is nn.Linear.forward
    assert strategy.accelerator._models == [wrapped]
    strategy.close()


class Settings:
    """What an Accelerator of another machine says of itself."""

    def __init__(self, **settings):
        own = accelerate.Accelerator(cpu=True)
        names = ("distributed_type", "dataloader_config", "parallelism_config", "is_fsdp2", "mixed_precision", "scaler")
        names += ("gradient_accumulation_steps", "device")
        vars(self).update({name: getattr(own, name) for name in names}, **settings)


TYPE = accelerate.DistributedType
LOADERS = accelerate.DataLoaderConfiguration


@pytest.mark.row("refused")
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"distributed_type": TYPE.DEEPSPEED}, r"a DeepSpeed plugin trains by TrainingArguments\(deepspeed="),
        ({"distributed_type": TYPE.MEGATRON_LM}, "Megatron-LM has a training loop of its own; use an FSDP2 plugin"),
        ({"distributed_type": TYPE.XLA}, "an XLA device trains by strategy='xla'"),
        ({"device": torch.device("mps")}, "an mps device trains by strategy='mps'"),
        ({"distributed_type": TYPE.FSDP}, "an FSDP plugin of version 1 is not offered; .* fsdp_version=2"),
        ({"parallelism_config": accelerate.ParallelismConfig(tp_size=2)}, "a parallelism_config with tp divides"),
        ({"mixed_precision": "fp8"}, "mixed_precision='fp8' is not offered; use 'bf16'"),
        ({"mixed_precision": "fp16"}, "mixed_precision='fp16' has no effect on this device"),
        ({"gradient_accumulation_steps": 4}, "gradient_accumulation_steps=4 would divide losses a second time"),
        ({"dataloader_config": LOADERS(split_batches=True)}, "split_batches=True does not act"),
        ({"dataloader_config": LOADERS(dispatch_batches=True)}, "dispatch_batches=True does not act"),
    ],
)
def test_a_setting_that_the_loop_would_not_follow_is_refused_in_one_sentence(settings, message):
    with pytest.raises(ValueError, match=f"an Accelerator with {message}"):
        AcceleratorStrategy(Settings(**settings))


def adopt_with_a_plugin_on_the_cpu():
    accelerator = joined(fsdp_plugin=accelerate.FullyShardedDataParallelPlugin(fsdp_version=2))
    with pytest.raises(ValueError, match="an FSDP plugin on the CPU would train whole replicas, .* strategy='fsdp'"):
        AcceleratorStrategy(accelerator)


@pytest.mark.row("refused")
def test_a_plugin_that_accelerate_ignores_on_the_cpu_is_refused():
    run_ranks(adopt_with_a_plugin_on_the_cpu, 1, timeout_s=TIME_LIMIT_S)


@pytest.mark.row("refused")
def test_an_optimizer_that_the_accelerator_prepared_is_refused():
    strategy = lone()
    model = strategy.prepare(nn.Linear(2, 1))
    optimizer = strategy.accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(ValueError, match=r"what accelerator.prepare\(\) returned, .* \(its attribute .optimizer"):
        strategy.bind_optimizer(model, optimizer)
    strategy.close()


@pytest.mark.row("refused")
def test_without_accelerate_the_strategy_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "accelerate", None)
    with pytest.raises(ValueError, match=r"needs accelerate, .* pip install 'tr-dist\[accelerate\]'"):
        AcceleratorStrategy.from_arguments(TrainingArguments(tmp_path))


@pytest.mark.row("export")
def test_a_checkpoint_is_opened_by_load_checkpoint_and_dispatch(tmp_path):
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=2, n_head=2, n_embd=8, vocab_size=16, n_positions=8, bos_token_id=0, eos_token_id=0)
    rows = [{"input_ids": torch.arange(8) % 16, "labels": torch.arange(8) % 16}] * 8
    args = TrainingArguments(
        tmp_path, use_cpu=True, save_steps=2, max_steps=2, disable_tqdm=True, log_level="error", learning_rate=0.1
    )
    trainer = Trainer(GPT2LMHeadModel(config), args, train_dataset=rows, strategy=lone())
    trainer.train()
    trainer.save_model(str(tmp_path / "end"))
    trainer.strategy.close()
    for folder in ("checkpoint-2", "end"):
        with accelerate.init_empty_weights():
            empty = GPT2LMHeadModel(config)
        empty.tie_weights()
        model = accelerate.load_checkpoint_and_dispatch(empty, str(tmp_path / folder), device_map={"": "cpu"})
        for name, value in trainer.model.state_dict().items():
            assert torch.equal(model.state_dict()[name], value), name


def hold_a_group_of_accelerate(folder):
    strategy = AcceleratorStrategy(joined())
    assert strategy.gather_objects(strategy.rank) == [0, 1]
    strategy.close()
    assert torch.distributed.is_initialized(), "the group is the user's"
    atexit._run_exitfuncs()  # a process of a fork server does not
    assert not torch.distributed.is_initialized()


def test_the_group_of_an_accelerator_stays_open_until_the_exit(tmp_path):
    shared = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "TR_RENDEZVOUS_FILE": str(tmp_path / "meet")}
    ranks = [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2)]
    ends = run_script(hold_a_group_of_accelerate, ranks, str(tmp_path), limit_s=TIME_LIMIT_S)
    assert [end.code for end in ends] == [0, 0], ends


def test_a_subclass_logs_by_accelerate_before_its_trainer_is_built(tmp_path, caplog, monkeypatch):
    for name in ("LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)

    class Early(Trainer):
        def __init__(self, *args, **kwargs):
            accelerate.logging.get_logger("early").warning("of the data")
            super().__init__(*args, **kwargs)

    trainer = Early(Network(), TrainingArguments(str(tmp_path), use_cpu=True), train_dataset=Rows(4))
    assert "of the data" in caplog.text
    assert accelerate.PartialState().device == trainer.args.device == torch.device("cpu")
    assert not torch.distributed.is_initialized()
