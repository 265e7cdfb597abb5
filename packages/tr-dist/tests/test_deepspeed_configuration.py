"""Fill in a DeepSpeed configuration from arguments and model, and refuse what disagrees; DeepSpeed is not needed."""

import json
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tr_dist.deepspeed import DeepSpeed
from tr_dist.deepspeed.configuration import (
    check_configuration,
    check_optimizer_name,
    fill_from_arguments,
    fill_from_model,
    read_configuration,
)
from tr_dist.deepspeed.engine import engine_configuration, load_deepspeed

AUTO = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "fp16": {"enabled": "auto"},
    "bf16": {"enabled": "auto"},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
    },
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {
            "warmup_min_lr": "auto",
            "warmup_max_lr": "auto",
            "warmup_num_steps": "auto",
            "total_num_steps": "auto",
        },
    },
    "zero_optimization": {
        "stage": 3,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
    },
}


GROUP = {"accelerator_config": None, "ddp_backend": None, "ddp_timeout": 60, "use_cpu": True}


def arguments(**given):
    values = {
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "max_grad_norm": 0.5,
        "fp16": False,
        "bf16": True,
        "learning_rate": 3e-4,
        "weight_decay": 0.01,
        "adam_beta1": 0.9,
        "adam_beta2": 0.95,
        "adam_epsilon": 1e-7,
        "optim": "adamw_torch_fused",
        "lr_scheduler_type": "linear",
        "warmup_steps": 0,
        "max_steps": 100,
    }
    return SimpleNamespace(**{**values, **given})


def model(**config):
    network = nn.Linear(2, 2)
    network.config = SimpleNamespace(**config)
    return network


def test_every_auto_is_filled_from_arguments_and_model():
    filled = fill_from_arguments(AUTO, arguments(), world_size=3)
    assert filled["train_batch_size"] == 24
    assert filled["train_micro_batch_size_per_gpu"] == 4
    assert filled["gradient_accumulation_steps"] == 2
    assert "gradient_clipping" not in filled  # the loop clips, by the arguments it was compared with
    assert "scheduler" not in filled
    assert (filled["fp16"], filled["bf16"]) == ({"enabled": False}, {"enabled": True})
    params = filled["optimizer"]["params"]
    assert params == {"lr": 3e-4, "betas": [0.9, 0.95], "eps": 1e-7, "weight_decay": 0.01}
    zero = fill_from_model(filled, model(hidden_size=10))["zero_optimization"]
    assert zero["reduce_bucket_size"] == 100
    assert zero["stage3_prefetch_bucket_size"] == 90
    assert zero["stage3_param_persistence_threshold"] == 100
    assert AUTO["train_batch_size"] == "auto"  # what was given stays as it is


def test_coefficients_of_another_optimizer_are_filled_and_compared_too():
    lamb = {"optimizer": {"type": "Lamb", "params": {"betas": "auto", "eps": "auto"}}}
    params = fill_from_arguments(lamb, arguments(), world_size=1)["optimizer"]["params"]
    assert params == {"lr": 3e-4, "betas": [0.9, 0.95], "eps": 1e-7, "weight_decay": 0.01}
    lamb["optimizer"]["params"]["betas"] = [0.9, 0.9]
    with pytest.raises(ValueError, match=r"optimizer\.params\.betas=\[0\.9, 0\.9\], and adam_beta1, adam_beta2 gives"):
        fill_from_arguments(lamb, arguments(), world_size=1)
    sgd = {"optimizer": {"type": "SGD", "params": {"lr": "auto"}}}
    filled = fill_from_arguments(sgd, arguments(), world_size=1)
    assert filled["optimizer"]["params"] == {"lr": 3e-4, "weight_decay": 0.01}


@pytest.mark.parametrize("config", [{"hidden_sizes": [4, 10]}, {"text_config": SimpleNamespace(hidden_size=10)}])
def test_the_hidden_size_is_found_where_models_of_several_parts_have_it(config):
    filled = fill_from_model({"zero_optimization": {"reduce_bucket_size": "auto"}}, model(**config))
    assert filled["zero_optimization"]["reduce_bucket_size"] == 100


def test_all_disagreements_are_listed_at_once():
    wrong = {
        "train_batch_size": 100,
        "train_micro_batch_size_per_gpu": 5,
        "gradient_accumulation_steps": 3,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": False},
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "betas": [0.9, 0.9], "eps": 1e-8, "weight_decay": 0}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-3, "warmup_num_steps": 7}},
    }
    with pytest.raises(ValueError, match="disagree") as caught:
        fill_from_arguments(wrong, arguments(), world_size=2)
    listed = [line.strip().split("=")[0] for line in str(caught.value).splitlines()[1:]]
    assert sorted(listed) == sorted(
        [
            "train_batch_size",
            "train_micro_batch_size_per_gpu",
            "gradient_accumulation_steps",
            "gradient_clipping",
            "bf16.enabled",
            "optimizer.params.lr",
            "optimizer.params.betas",
            "optimizer.params.eps",
            "optimizer.params.weight_decay",
            "scheduler.type",
            "scheduler.params.warmup_max_lr",
            "scheduler.params.warmup_num_steps",
        ]
    )
    assert "gradient_accumulation_steps=3, and gradient_accumulation_steps gives 2" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "given", "meaning", "needed"),
    [
        ("train_micro_batch_size_per_gpu", 5, "per_device_train_batch_size", 4),
        ("gradient_accumulation_steps", 3, "gradient_accumulation_steps", 2),
        (
            "train_batch_size",
            32,
            "per_device_train_batch_size x gradient_accumulation_steps x 3 processes",
            24,
        ),
    ],
)
def test_a_batch_size_that_contradicts_the_arguments_is_refused_in_words(name, given, meaning, needed):
    with pytest.raises(ValueError, match="disagree; write 'auto' in the former, or change one of the two") as caught:
        fill_from_arguments({**AUTO, name: given}, arguments(), world_size=3)
    assert str(caught.value).splitlines()[1:] == [f"  {name}={given}, and {meaning} gives {needed}"]


def test_equal_numbers_of_another_type_do_not_disagree():
    fill_from_arguments({"gradient_clipping": 1, "train_batch_size": 8.0}, arguments(max_grad_norm=1.0), world_size=1)


def test_a_warm_up_by_logarithms_is_refused():
    schedule = {"scheduler": {"type": "WarmupLR", "params": {}}}
    asked = arguments(lr_scheduler_type="constant_with_warmup", warmup_steps=10)
    with pytest.raises(ValueError, match="warmup_type='log'"):
        fill_from_arguments(schedule, asked, world_size=1)
    schedule["scheduler"]["params"]["warmup_type"] = "linear"
    fill_from_arguments(schedule, asked, world_size=1)


def test_two_optimizers_are_refused():
    with pytest.raises(ValueError, match="optimizer.type='AdamW', and optim='sgd'"):
        fill_from_arguments({"optimizer": {"type": "AdamW"}}, arguments(optim="sgd"), world_size=1)


def test_a_size_without_a_hidden_size_and_what_nothing_fills_are_refused():
    with pytest.raises(ValueError, match=r"zero_optimization.reduce_bucket_size = 'auto'.* Linear has none"):
        fill_from_model({"zero_optimization": {"reduce_bucket_size": "auto"}}, nn.Linear(2, 2))
    with pytest.raises(ValueError, match="aio.block_size = 'auto', which nothing gives a value to"):
        fill_from_model({"aio": {"block_size": "auto"}}, nn.Linear(2, 2))


def test_settings_that_cannot_be_had_are_listed():
    wrong = {
        "amp": {"enabled": True},
        "gradient_clipping": 1.0,
        "scheduler": {"type": "WarmupLR"},
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 0, "offload_optimizer": {"device": "disk"}, "offload_param": {"device": "cpu"}},
    }
    with pytest.raises(ValueError, match="cannot be used") as caught:
        check_configuration(wrong)
    for said in (
        "Apex",
        "clip_grad_norm(model",
        "step a schedule",
        "offload_optimizer.device='disk': it is 'none' or 'cpu'",
        "offload_param: nothing is divided at stage 0",
        "stage=0 with bf16",
    ):
        assert said in str(caught.value)
    with pytest.raises(ValueError, match="stage=4: it is 0, 1, 2 or 3"):
        check_configuration({"zero_optimization": {"stage": 4}})


@pytest.mark.parametrize("part", ["offload_optimizer", "offload_param"])
def test_offload_to_nvme_is_refused_before_anything_starts(part):
    disk = {"zero_optimization": {"stage": 3, part: {"device": "nvme", "nvme_path": "swap"}}}
    said = rf"zero_optimization.{part}.device='nvme': nothing is swapped to a disk; use device='cpu'"
    with pytest.raises(ValueError, match=said):
        DeepSpeed(disk, use_cpu=True)
    with pytest.raises(ValueError, match=said):
        DeepSpeed.from_arguments(arguments(deepspeed=disk, **GROUP))


def test_parameters_are_offloaded_at_stage_3_only():
    with pytest.raises(ValueError, match="offload_param.device='cpu': needs stage 3, not 1"):
        check_configuration({"zero_optimization": {"stage": 1, "offload_param": {"device": "cpu"}}})


@pytest.mark.parametrize("name", ["galore_adamw", "lomo", "adalomo", "apollo_mini", "adafactor"])
def test_optimizers_that_need_matrices_are_refused_by_name_where_there_are_none(name):
    with pytest.raises(ValueError, match="flat buffers; use strategy='fsdp'"):
        check_optimizer_name(name, 2)
    for other, stage in (("adamw_torch", 2), ("adafactor", 0), ("galore_adamw", 0)):
        check_optimizer_name(other, stage)


def test_a_file_is_read_and_what_is_no_configuration_is_named(tmp_path):
    file = tmp_path / "zero.json"
    with pytest.raises(ValueError, match=r"zero.json does not exist"):
        read_configuration(file)
    for text, said in (("{", "is not valid JSON"), ("[]", "holds a list")):
        file.write_text(text)
        with pytest.raises(ValueError, match=said):
            read_configuration(str(file))
    file.write_text(json.dumps(AUTO))
    assert read_configuration(str(file)) == AUTO


def test_the_strategy_needs_a_configuration():
    with pytest.raises(ValueError, match=r"strategy='deepspeed' needs a configuration"):
        DeepSpeed.from_arguments(SimpleNamespace(deepspeed=None))


def test_nothing_is_pinned_for_a_device_that_is_the_host():
    given = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": True}}}
    on_cpu = engine_configuration(given, SimpleNamespace(type="cpu"))
    assert on_cpu["zero_optimization"]["offload_optimizer"]["pin_memory"] is False
    on_cuda = engine_configuration(given, SimpleNamespace(type="cuda"))
    assert on_cuda["zero_optimization"]["offload_optimizer"]["pin_memory"] is True
    assert given["zero_optimization"]["offload_optimizer"]["pin_memory"] is True


def test_an_exchange_after_each_micro_batch_cannot_be_asked_for():
    each = SimpleNamespace(gradient_accumulation_kwargs={"sync_each_batch": True})
    asked = arguments(accelerator_config=each, deepspeed={"zero_optimization": {"stage": 1}})
    with pytest.raises(ValueError, match="sync_each_batch=True cannot be used with ZeRO"):
        DeepSpeed.from_arguments(asked)


def test_float16_needs_an_accelerator():
    with pytest.raises(ValueError, match=r"fp16.enabled needs an accelerator; on the CPU use bf16"):
        DeepSpeed({"fp16": {"enabled": True}, "zero_optimization": {"stage": 2}}, use_cpu=True)


def test_without_the_library_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    with pytest.raises(ValueError, match=r"pip install 'tr-dist\[deepspeed\]'"):
        DeepSpeed({"zero_optimization": {"stage": 2}}, use_cpu=True)


def test_a_library_that_was_loaded_for_another_accelerator_is_refused(monkeypatch):
    monkeypatch.setenv("DS_ACCELERATOR", "cuda")
    other = SimpleNamespace(get_accelerator=lambda: SimpleNamespace(device_name=lambda: "cuda"))
    monkeypatch.setitem(sys.modules, "deepspeed", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "deepspeed.accelerator", other)
    with pytest.raises(ValueError, match="DeepSpeed computes on 'cuda' and this rank on cpu; set DS_ACCELERATOR=cpu"):
        load_deepspeed(torch.device("cpu"))
