"""Choose the strategy that the arguments and the launcher ask for."""

from __future__ import annotations

import math
import os
from typing import Any

from tr_args.topology import from_environment
from tr_core import plugins
from tr_core.launcher_settings import check_all_were_started
from tr_core.protocols import Strategy
from tr_core.single_device import choose_device
from tr_core.xla_devices import belongs_on_xla


def choose_strategy(args: Any) -> Strategy:
    """Return the strategy called `args.strategy`.

    `auto` is `deepspeed` where there is a configuration for it, `xla` where a TPU is (see `belongs_on_xla`), `fsdp`
    where the arguments say how to shard, else `ddp` under a launcher of several processes, else `mps` on a Mac's GPU if
    that is installed, else `single`.

    Raises:
        tr_core.plugins.PluginError: it is not installed.
        ValueError: `single` was asked for, but a launcher started several processes; or a launcher was asked for
            several and started one; or `parallelism_config` is for another number of them.
    """
    return plugins.load("tr.strategies", _name(args))(args)


def _name(args: Any) -> str:
    name = str(args.strategy)
    sizes = args.parallelism_config or {}
    world_size = from_environment().world_size if os.environ.get("WORLD_SIZE") != "" else 1
    if name == "auto":
        sharded = "deepspeed" if args.deepspeed else "xla" if belongs_on_xla(args) else "fsdp" if args.fsdp else ""
        name = sharded or ("ddp" if world_size > 1 else _of_one_process(args))
    if world_size == 1:
        check_all_were_started(os.environ)
    if sizes and math.prod(sizes.values()) != world_size:
        shown = " x ".join(f"{name}={size}" for name, size in sizes.items())
        raise ValueError(
            f"parallelism_config spreads samples over {shown} processes, and {world_size} were started (WORLD_SIZE); "
            "start as many as their product, or leave it out"
        )
    if name == "single" and world_size > 1:
        raise ValueError(
            f"strategy='single' in one of {world_size} processes (WORLD_SIZE) would train {world_size} unrelated "
            "models; start one process, or set strategy='auto' or 'ddp'"
        )
    return name


def _of_one_process(args: Any) -> str:
    is_on_mac = choose_device(args.use_cpu).type == "mps"
    return "mps" if is_on_mac and "mps" in plugins.available("tr.strategies") else "single"
