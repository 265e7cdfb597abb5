"""Choose the strategy that the arguments and the launcher ask for."""

from __future__ import annotations

import os
from typing import Any

from tr_args.topology import from_environment
from tr_core import plugins
from tr_core.launcher_settings import check_all_were_started
from tr_core.protocols import Strategy


def choose_strategy(args: Any) -> Strategy:
    """Return the strategy called `args.strategy`.

    `auto` is `deepspeed` where there is a configuration for it, `fsdp` where the arguments say how to shard, else `ddp`
    under a launcher of several processes, else `single`.

    Raises:
        tr_core.plugins.PluginError: it is not installed.
        ValueError: `single` was asked for, but a launcher started several processes; or a launcher was asked for
            several and started one.
    """
    name = str(args.strategy)
    world_size = from_environment().world_size if os.environ.get("WORLD_SIZE") != "" else 1
    if name == "auto":
        sharded = "deepspeed" if args.deepspeed else "fsdp" if args.fsdp else ""
        name = sharded or ("ddp" if world_size > 1 else "single")
    if world_size == 1:
        check_all_were_started(os.environ)
    if name == "single" and world_size > 1:
        raise ValueError(
            f"strategy='single' in one of {world_size} processes (WORLD_SIZE) would train {world_size} unrelated "
            "models; start one process, or set strategy='auto' or 'ddp'"
        )
    return plugins.load("tr.strategies", name)(args)
