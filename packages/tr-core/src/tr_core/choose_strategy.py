"""Select the strategy that the arguments and the launcher request."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tr_args import TrainingArguments
from tr_args.launcher_settings import filled_by_launcher
from tr_args.process import read_topology
from tr_args.types.sharding import DATA_SIZES, FACTORS, WITHIN_SAMPLES
from tr_core import plugins
from tr_core.protocols import Strategy
from tr_core.single_device import choose_device, complete_strategy
from tr_core.start import stage
from tr_log import get_logger, info_once


def choose_strategy(args: TrainingArguments) -> Strategy:
    """Return the strategy called `args.strategy`.

    `auto` selects the first that fits:

    - `deepspeed` if it is configured
    - `xla` on a TPU (see `belongs_on_xla`)
    - `fsdp` if the arguments configure sharding
    - `ddp` under a launcher of several processes
    - `mps` on a Mac's GPU if it is installed
    - `single`

    Raises:
        tr_core.plugins.PluginError: the strategy is not installed.
        ValueError: a launcher should have started several processes and started one; or `parallelism_config` is for
            another number of processes.
    """
    name = _name(args)
    return plugins.load("tr.strategies", name)(args)


@stage("strategy")
def usable_strategy(args: TrainingArguments, given: Any = None) -> Strategy:
    """Return a given strategy, or the one that the arguments request, completed by `complete_strategy`.

    Raises:
        TypeError: methods are missing and cannot be added to the given object.
        ValueError: see `choose_strategy`; a launcher started several processes, and each would train a model of its
            own; `fsdp` or `deepspeed` is set, and the strategy does not act on it; or it has other sizes than
            `parallelism_config`.
    """
    strategy = complete_strategy(choose_strategy(args) if given is None else given)
    name = args.strategy if given is None else type(given).__name__
    for option in ("fsdp", "deepspeed"):
        if getattr(args, option) and option not in strategy.acts_on:
            raise ValueError(
                f"{option} is set, and strategy={name!r} does not act on it (its acts_on is "
                f"{sorted(strategy.acts_on)}); leave {option} out, or set strategy='auto'"
            )
    if args.elastic is not None and given is not None:
        raise ValueError(
            f"elastic={args.elastic!r} chooses its own strategy, and {name} was given; leave one of them out"
        )
    sizes = args.parallelism_config or {}
    wanted = {size: number for size in WITHIN_SAMPLES if (number := sizes.get(size, 1)) > 1}
    together = strategy.world_size // strategy.data.world_size
    if wanted and math.prod(wanted.values()) != together:
        raise ValueError(
            f"parallelism_config has {_shown(wanted)}, and strategy={name!r} has {together} process(es) compute a "
            "sample; leave it out, or pass no strategy and leave the choice to strategy='auto'"
        )
    divided = strategy.sizes
    others = {size: number for size, number in wanted.items() if divided and divided.get(size, 1) != number}
    if (experts := sizes.get("ep_size", 1)) not in (1, divided.get("ep_size", 1)):
        others["ep_size"] = experts
    if others:
        raise ValueError(
            f"parallelism_config has {_shown(others)}, and strategy={name!r} has "
            f"{_shown({size: divided.get(size, 1) for size in others})}; leave it out, or pass no strategy and leave "
            "the choice to strategy='auto'"
        )
    started = _started_processes()
    if strategy.world_size == 1 < started and strategy.members is None:
        raise ValueError(
            f"strategy={name!r} in one of {started} processes (WORLD_SIZE) would train {started} unrelated models; "
            "start one process, or set strategy='auto' or 'ddp'"
        )
    return strategy


def _name(args: TrainingArguments) -> str:
    name = str(args.strategy)
    sizes = args.parallelism_config or {}
    world_size = _started_processes()
    if name == "auto":
        together = any(sizes.get(size, 1) > 1 for size in (*WITHIN_SAMPLES, "ep_size"))
        divided = "mesh" if together else "fsdp" if args.fsdp else ""
        sharded = "deepspeed" if args.deepspeed else "xla" if belongs_on_xla(args) else divided
        name = sharded or ("ddp" if world_size > 1 else _of_one_process(args))
    if args.elastic is not None:
        name = "elastic"
    if world_size == 1:
        check_processes_started(os.environ)
    factors = {size: number for size, number in sizes.items() if size in FACTORS}
    product, is_open = math.prod(factors.values()), bool(sizes) and not set(sizes) & set(DATA_SIZES)
    if factors and product != world_size and not (is_open and world_size % product == 0):
        raise ValueError(
            f"parallelism_config spreads the work over {_shown(factors)} processes, and {world_size} were started "
            f"(WORLD_SIZE); start {'a multiple' if is_open else 'as many as their product'}, or leave it out"
            + _sizes_that_work(factors, world_size, is_open=is_open)
        )
    return name


def _sizes_that_work(sizes: Mapping[str, int], world_size: int, *, is_open: bool) -> str:
    """Return which values of one size, beside the others, fit the number of processes; empty if none of any does."""
    product, found = math.prod(sizes.values()), []
    for name, size in sizes.items():
        left, rest = divmod(world_size * size, product)
        if not rest:
            fitting = [n for n in range(2, left + 1) if left % n == 0] if is_open else [left]
            found += [f"{name} {' or '.join(map(str, fitting))}"] if fitting else []
    return f"; with {world_size} processes it may be {', or '.join(found)}" if found else ""


def _shown(sizes: Mapping[str, int]) -> str:
    return " x ".join(f"{name}={size}" for name, size in sizes.items())


def _started_processes() -> int:
    return read_topology().world_size


def _of_one_process(args: TrainingArguments) -> str:
    is_on_mac = choose_device(args.use_cpu).type == "mps"
    return "mps" if is_on_mac and "mps" in plugins.available("tr.strategies") else "single"


logger = get_logger(__name__)


def log_launcher_settings(args: TrainingArguments) -> None:
    """Log once the arguments that the user did not set and that follow the launcher's variables."""
    if filled := filled_by_launcher(args):
        listed = ", ".join(f"{name}={getattr(args, name)!r} ({variable})" for name, variable in filled.items())
        info_once(logger, "the launcher set what the arguments leave open: %s", listed)


def check_processes_started(environ: Mapping[str, str]) -> None:
    """Raise if `accelerate launch` should have started several processes and started one, as it does without GPUs."""
    is_launched = "ACCELERATE_MIXED_PRECISION" in environ and "MASTER_PORT" in environ
    if is_launched and "RANK" not in environ and "WORLD_SIZE" not in environ:
        raise ValueError(
            "accelerate launch was asked for several processes (it set MASTER_PORT), but it started one, as it does "
            "where it finds no GPUs; start them with accelerate launch --multi_gpu, or with trainer launch --nproc N"
        )


_FALSE_VALUES = ("0", "false", "f", "no", "n", "off")
_GOOGLE_PCI_VENDOR = "0x1ae0"
# PCI numbers of TPUs: v2 and v3, two for tests, v4, v5e, v6e, v7x.
_TPU_PCI_DEVICES = ("0x0027", "0x0056", "0x0062", "0x005e", "0x0063", "0x006f", "0x0076")
_PCI_DEVICES = Path("/sys/bus/pci/devices")


def belongs_on_xla(
    args: TrainingArguments, environ: Mapping[str, str] | None = None, devices: Path = _PCI_DEVICES
) -> bool:
    """Whether `strategy="auto"` selects `xla`: `fsdp_config` requests it, or torch_xla and its device exist.

    An importable torch_xla is not enough: PJRT_DEVICE must name a device, or the machine must have a TPU. Neither
    counts with `use_cpu` or USE_TORCH_XLA=0. `devices` is where the system lists its PCI devices.
    """
    if args.fsdp_config.get("xla"):
        return True
    environ = os.environ if environ is None else environ
    if args.use_cpu or environ.get("USE_TORCH_XLA", "").lower() in _FALSE_VALUES or find_spec("torch_xla") is None:
        return False
    return bool(environ.get("PJRT_DEVICE")) or has_tpu(devices)


def has_tpu(devices: Path = _PCI_DEVICES) -> bool:
    """Whether this machine has a TPU, by the numbers of its PCI devices."""
    for vendor in devices.glob("*/vendor"):
        if (
            vendor.read_text().strip() == _GOOGLE_PCI_VENDOR
            and (vendor.parent / "device").read_text().strip() in _TPU_PCI_DEVICES
        ):
            return True
    return False
