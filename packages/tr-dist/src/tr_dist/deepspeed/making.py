"""Make DeepSpeed's engine of a module and its optimizer."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from tr_dist.deepspeed.configuration import look_up, low_precision

# What a group of the configuration's own optimizer takes over from the one that was built.
_KEPT = ("params", "lr", "initial_lr", "weight_decay")
_NEVER = 2**62
_BUFFER_SIZE = 100_000_000  # numbers, where the configuration leaves it out
# Of torch, tr-optim or other libraries: of a flat buffer these make something else, and do not say so.
_OF_MATRICES = ("Adafactor", "Muon", "SOAP", "Shampoo")


def check_optimizer(optimizer: torch.optim.Optimizer, module: nn.Module, stage: int) -> None:
    """Refuse an optimizer that would not train the module as it does elsewhere.

    Raises:
        ValueError: the message says why, and what to do.
    """
    name = type(optimizer).__name__
    if getattr(optimizer, "fused_in_backward", False):
        raise ValueError(
            f"{name} consumes gradients in the backward pass, which DeepSpeed averages after it; use strategy='fsdp' "
            "or 'ddp', or another optimizer"
        )
    if stage and (hasattr(optimizer, "fused_in_backward") or name in _OF_MATRICES):
        raise ValueError(
            f"{name} works on whole matrices, where DeepSpeed (ZeRO stage {stage}) has flat buffers; use "
            "strategy='fsdp' or 'ddp', or another optimizer"
        )
    if stage and isinstance(optimizer, torch.optim.Adagrad):
        raise ValueError(
            "DeepSpeed replaces torch's Adagrad by one without its groups and learning rates; use another optimizer, "
            "or strategy='fsdp' or 'ddp'"
        )
    own = {id(parameter) for parameter in module.parameters()}
    given = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if foreign := sum(id(parameter) not in own for parameter in given):
        raise ValueError(
            f"{foreign} of {len(given)} parameters of {name} are not the model's; build it over the parameters of the "
            "module that was given to prepare()"
        )
    if frozen := sum(not parameter.requires_grad for parameter in given):
        raise ValueError(f"{frozen} of {len(given)} parameters of {name} are frozen; build it over the others only")


def check_swap_buffers(configuration: dict[str, Any], module: nn.Module, world_size: int) -> None:
    """Refuse buffers that are too small for a rank's part of a parameter that is swapped to NVMe.

    Raises:
        ValueError: the message says how large they have to be.
    """
    section = look_up(configuration, "zero_optimization.offload_param") or {}
    if section.get("device") != "nvme":
        return
    largest = max(-(-getattr(each, "ds_numel", each.numel()) // world_size) for each in module.parameters())
    size = section.get("buffer_size", _BUFFER_SIZE)
    if largest > size:
        raise ValueError(
            f"zero_optimization.offload_param.buffer_size={size}: the largest part of a parameter on one of "
            f"{world_size} ranks has {largest} numbers; set it to that or more"
        )


def given_groups(optimizer: torch.optim.Optimizer) -> list[list[nn.Parameter]]:
    """Return the parameters of each group."""
    return [list(group["params"]) for group in optimizer.param_groups]


def make_engine(
    deepspeed: Any,
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    configuration: dict[str, Any],
    device: torch.device,
) -> Any:
    """Return an engine that trains `module` with `optimizer`, or with the configuration's own in its groups.

    Collective. The optimizer's groups hold flat tensors afterwards.

    Raises:
        ValueError: a group is empty, and not the last.
    """
    config = engine_configuration(configuration, device)
    empty = _take_off_empty_groups(optimizer)
    options: dict[str, Any] = {"model": module, "config": config, "dist_init_required": False}
    if "optimizer" in config:
        groups = [{name: group[name] for name in _KEPT if name in group} for group in optimizer.param_groups]
        options["model_parameters"] = groups
    else:
        options["optimizer"] = optimizer
    _divide_to_files(deepspeed, module, config)
    engine = deepspeed.initialize(**options)[0]
    if "optimizer" in config:
        optimizer.param_groups, optimizer.state = engine.basic_optimizer.param_groups, engine.basic_optimizer.state
    optimizer.param_groups.extend(empty)
    return engine


def engine_configuration(configuration: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Return the configuration as the engine gets it."""
    config = copy.deepcopy(configuration)
    if "train_batch_size" not in config:
        config.setdefault("train_micro_batch_size_per_gpu", 1)
    config.setdefault("zero_allow_untested_optimizer", True)
    config.setdefault("zero_force_ds_cpu_optimizer", False)
    config.setdefault("steps_per_print", _NEVER)
    if (look_up(config, "zero_optimization.offload_param") or {}).get("device") == "nvme":
        # Fetched ahead of a step or of an evaluation, parameters are taken for swapped out when they are not.
        config["zero_optimization"]["stage3_prefetch_bucket_size"] = 0
    for name in ("offload_optimizer", "offload_param"):
        section = config.get("zero_optimization", {}).get(name)
        if section and device.type == "cpu":
            section["pin_memory"] = False  # there is no device to copy to
    return config


def _divide_to_files(deepspeed: Any, module: nn.Module, config: dict[str, Any]) -> None:
    """Have parameters that are to be in files there in float32, where nothing else is asked for.

    Where there is no float16, on the CPU, `initialize` takes buffers of bfloat16 for them, and rounds.
    """
    on_disk = (look_up(config, "zero_optimization.offload_param") or {}).get("device") == "nvme"
    is_divided = any(hasattr(parameter, "ds_id") for parameter in module.parameters())
    if on_disk and not is_divided and low_precision(config) is None:
        # Without the batch sizes, which are not those of one process; DeepSpeed does not know the others yet.
        given = {name: config[name] for name in ("zero_optimization", "aio") if name in config}
        given["train_micro_batch_size_per_gpu"] = 1
        deepspeed.zero.Init(module=module, config_dict_or_path=given, remote_device="nvme", pin_memory=False)


def _take_off_empty_groups(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return the groups at the end that have no parameters, taken off: DeepSpeed would drop them, schedules not."""
    groups = optimizer.param_groups
    last = max((number for number, group in enumerate(groups) if group["params"]), default=-1)
    if any(not group["params"] for group in groups[: last + 1]):
        raise ValueError("a parameter group before another one is empty; leave it out, or put it last")
    empty = groups[last + 1 :]
    del groups[last + 1 :]
    return empty
