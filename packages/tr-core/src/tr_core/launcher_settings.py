"""Say which arguments come from the launcher, and refuse a launch that started fewer processes than were asked for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tr_args.launcher_settings import filled_by_launcher
from tr_log import get_logger, info_once

logger = get_logger(__name__)


def tell_what_launcher_set(args: Any) -> None:
    """Log, once, the arguments that were silent and follow the launcher's variables."""
    if filled := filled_by_launcher(args):
        listed = ", ".join(f"{name}={getattr(args, name)!r} ({variable})" for name, variable in filled.items())
        info_once(logger, "the launcher set what the arguments leave open: %s", listed)


def check_all_were_started(environ: Mapping[str, str]) -> None:
    """Raise where `accelerate launch` was asked for several processes and started one, as it does without GPUs.

    Raises:
        ValueError: the message says how to start them.
    """
    is_launched = "ACCELERATE_MIXED_PRECISION" in environ and "MASTER_PORT" in environ
    if is_launched and "RANK" not in environ and "WORLD_SIZE" not in environ:
        raise ValueError(
            "accelerate launch was asked for several processes (it set MASTER_PORT), but it started one, as it does "
            "where it finds no GPUs; start them with accelerate launch --multi_gpu, or with trainer launch --nproc N"
        )
