"""Choose the strategy that the arguments and the launcher ask for."""

from __future__ import annotations

import os
from typing import Any

from tr_core import plugins
from tr_core.protocols import Strategy


def choose_strategy(args: Any) -> Strategy:
    """Return the strategy called `args.strategy`.

    `auto` is `fsdp` where the arguments say how to shard, else `ddp` under a launcher of several processes, else
    `single`.

    Raises:
        tr_core.plugins.PluginError: it is not installed.
        ValueError: `single` was asked for, but a launcher started several processes.
    """
    name = str(args.strategy)
    world_size = int(os.environ.get("WORLD_SIZE", "1") or "1")
    if name == "auto":
        name = "fsdp" if args.fsdp else "ddp" if world_size > 1 else "single"
    if name == "single" and world_size > 1:
        raise ValueError(
            f"strategy='single' in one of {world_size} processes (WORLD_SIZE) would train {world_size} unrelated "
            "models; start one process, or set strategy='auto' or 'ddp'"
        )
    return plugins.load("tr.strategies", name)(args)
