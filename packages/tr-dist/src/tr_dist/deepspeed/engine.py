"""Load DeepSpeed for one device, build its engine, and hold the module that the engine trains.

The engine can be built only with an optimizer. `reset_process_group` makes DeepSpeed release the process group.
"""

from __future__ import annotations

import copy
import importlib
import os
import warnings
from typing import Any

import torch
from torch import nn

from tr_dist.base import consumes_gradients
from tr_dist.environment import LaunchEnvironment, read_environment

_LOCAL_RANK = "LOCAL_RANK"
_set_here: dict[str, str | None] = {}  # environment variables that `set_local_rank` has set, and what they were
_GROUPS = ("_WORLD_GROUP", "_ZERO_PARAM_INTRA_PARALLEL_GROUP", "mesh_device")


def load_deepspeed(device: torch.device) -> Any:
    """Return the module `deepspeed`, for the accelerator of `device`.

    On the CPU it must not compile its shared-memory extension. That takes minutes, and if it is interrupted once,
    every later run waits for its lock.

    Raises:
        ValueError: it is not installed, or was loaded for another accelerator.
    """
    if device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    try:
        deepspeed = importlib.import_module("deepspeed")
    except ImportError as error:
        raise ValueError(
            f"strategy='deepspeed' needs DeepSpeed, which cannot be imported ({error}): pip install "
            "'tr-dist[deepspeed]'"
        ) from error
    found = importlib.import_module("deepspeed.accelerator").get_accelerator().device_name()
    if found != device.type:
        raise ValueError(
            f"DeepSpeed computes on {found!r} and this rank on {device}; set DS_ACCELERATOR={device.type} in the "
            "environment before deepspeed is imported"
        )
    # Newer versions of torch warn about DeepSpeed's own calls, which users cannot change.
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+_tensor` is deprecated", FutureWarning)
    if device.type == "cpu":
        operations = importlib.import_module("deepspeed.ops")
        operations.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


def read_launch_environment() -> LaunchEnvironment:
    """Return the launcher's variables, without those of `set_local_rank`.

    Raises:
        ValueError: they contradict each other, or are incomplete.
    """
    before = {**os.environ, **_set_here}
    return read_environment({name: value for name, value in before.items() if value is not None})


def set_local_rank(local_rank: int, device: torch.device) -> None:
    """Set LOCAL_RANK in the environment to the device's index, or the local rank. Undone on leaving.

    DeepSpeed reads it only there, and takes it for the index of the device.
    """
    index = str(local_rank if device.index is None else device.index)
    if os.environ.get(_LOCAL_RANK) != index:
        _set_here.setdefault(_LOCAL_RANK, os.environ.get(_LOCAL_RANK))
        os.environ[_LOCAL_RANK] = index


def reset_process_group() -> None:
    """Make DeepSpeed use the next process group: the one that it holds was left."""
    for name, value in _set_here.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
    _set_here.clear()
    vars(importlib.import_module("deepspeed.comm.comm"))["cdb"] = None
    groups = vars(importlib.import_module("deepspeed.utils.groups"))
    for name in _GROUPS:
        if name in groups:
            groups[name] = None


class EngineModel(nn.Module):
    """A module whose forward goes through DeepSpeed's engine, once there is one.

    Until then the module computes alone, undivided, on the device.

    Args:
        module: the module to train.
        device: the device of this rank.
        dtype: of the module under the engine; floating-point inputs are converted to it. None leaves them.

    Attributes:
        module: the module to train.
        given_groups: the parameters of each of the optimizer's groups, before the engine replaced them.
    """

    def __init__(self, module: nn.Module, device: torch.device, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.module = module
        self.given_groups: list[list[nn.Parameter]] = []
        self._device, self._dtype = device, dtype
        # In a list: as an attribute the engine, which is a module, would become a submodule.
        self._engines: list[Any] = []
        self._collected: list[tuple[torch.Tensor, torch.Tensor]] = []

    @property
    def engine(self) -> Any:
        """DeepSpeed's engine, None without an optimizer."""
        return self._engines[0] if self._engines else None

    def take_engine(self, engine: Any, given_groups: list[list[nn.Parameter]]) -> None:
        """Compute through `engine` from here on."""
        self._engines, self.given_groups = [engine], given_groups
        flats = getattr(engine.optimizer, "single_partition_of_fp32_groups", ())
        self._collected = [(flat, flat.grad) for flat in flats if flat.grad is not None]

    def restore_buffers(self) -> None:
        """Restore the gradients that ZeRO collects in host memory, if `zero_grad` removed them."""
        for flat, buffer in self._collected:
            flat.grad = buffer

    def drop_engine(self) -> None:
        """Remove the engine's hooks from the module; under ZeRO-3 it stays divided until there is another engine."""
        if (engine := self.engine) is None:
            return
        self._engines, self._collected = [], []
        engine.module_forward_pre_hook.remove()
        engine.module_forward_post_hook.remove()
        engine.destroy()

    def forward(self, *inputs: Any, **options: Any) -> Any:
        """Call the module with its usual arguments."""
        engine = self.engine
        if engine is None:
            return self.module.to(self._device)(*inputs, **options)
        if self._dtype is not None:
            inputs, options = _converted(inputs, self._dtype), _converted(options, self._dtype)
        return engine(*inputs, **options)


def _converted(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if type(value) in (list, tuple):
        return type(value)(_converted(item, dtype) for item in value)
    if type(value) is dict:
        return {key: _converted(item, dtype) for key, item in value.items()}
    return value


# Options that a group of the configuration's own optimizer copies from the one that was built.
_KEPT = ("params", "lr", "initial_lr", "weight_decay")
_NEVER = 2**62
# Optimizers of torch, tr-optim or other libraries that silently train differently on a flat buffer.
_NEED_MATRICES = ("Adafactor", "Muon", "MuonAdamW", "SOAP", "Shampoo")
_NEED_WHOLE = {
    "GrokAdamW": "clips by the norm of each parameter",
    "OptimiStableAdamW": "scales its step by a mean over each parameter",
    "StableAdamW": "scales its step by a mean over each parameter",
}


def check_optimizer(optimizer: torch.optim.Optimizer, module: nn.Module, stage: int) -> None:
    """Refuse an optimizer that trains the module differently under DeepSpeed.

    Raises:
        ValueError: the message says why, and what to do.
    """
    name = type(optimizer).__name__
    if consumes_gradients(optimizer):
        raise ValueError(
            f"{name} consumes gradients in the backward pass, which DeepSpeed averages after it; use strategy='fsdp' "
            "or 'ddp', or another optimizer"
        )
    if stage and (hasattr(optimizer, "fused_in_backward") or name in _NEED_MATRICES):
        raise ValueError(
            f"{name} works on whole matrices, where DeepSpeed (ZeRO stage {stage}) has flat buffers; use "
            "strategy='fsdp' or 'ddp', or another optimizer"
        )
    if stage and (why := _why_whole(optimizer)):
        raise ValueError(
            f"{name} {why}, where DeepSpeed (ZeRO stage {stage}) has flat buffers; use strategy='ddp', or another "
            "optimizer"
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


def _why_whole(optimizer: torch.optim.Optimizer) -> str | None:
    """Say why an optimizer's update is another on a part of a flat buffer; None if it is the same."""
    if callable(getattr(optimizer, "eval", None)):  # of schedulefree
        return "changes the model's weights for an evaluation"
    return _NEED_WHOLE.get(type(optimizer).__name__)


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
        ValueError: a group other than the last is empty.
    """
    config = engine_configuration(configuration, device)
    empty = _take_off_empty_groups(optimizer)
    options: dict[str, Any] = {"model": module, "config": config, "dist_init_required": False}
    if "optimizer" in config:
        groups = [{name: group[name] for name in _KEPT if name in group} for group in optimizer.param_groups]
        options["model_parameters"] = groups
    else:
        options["optimizer"] = optimizer
    engine = deepspeed.initialize(**options)[0]
    if "optimizer" in config:
        optimizer.param_groups, optimizer.state = engine.basic_optimizer.param_groups, engine.basic_optimizer.state
    optimizer.param_groups.extend(empty)
    return engine


def engine_configuration(configuration: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Return the configuration in the form that the engine gets."""
    config = copy.deepcopy(configuration)
    if "train_batch_size" not in config:
        config.setdefault("train_micro_batch_size_per_gpu", 1)
    config.setdefault("zero_allow_untested_optimizer", True)
    config.setdefault("zero_force_ds_cpu_optimizer", False)
    config.setdefault("steps_per_print", _NEVER)
    for name in ("offload_optimizer", "offload_param"):
        section = config.get("zero_optimization", {}).get(name)
        if section and device.type == "cpu":
            section["pin_memory"] = False  # there is no device to copy to
    return config


def _take_off_empty_groups(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Remove and return empty groups at the end: DeepSpeed would drop them, schedules would not."""
    groups = optimizer.param_groups
    last = max((number for number, group in enumerate(groups) if group["params"]), default=-1)
    if any(not group["params"] for group in groups[: last + 1]):
        raise ValueError("a parameter group before another one is empty; leave it out, or put it last")
    empty = groups[last + 1 :]
    del groups[last + 1 :]
    return empty
