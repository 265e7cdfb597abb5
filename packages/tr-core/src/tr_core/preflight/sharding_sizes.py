"""Compare the batch sizes in a DeepSpeed configuration with those of the arguments and the number of processes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tr_args import ArgumentsError
from tr_args.files import read_mapping
from tr_core.preflight.report import Problem
from tr_core.preflight.subject import Subject


def check_batch_sizes(subject: Subject) -> Iterator[Problem]:
    """Find batch sizes that cannot all be true: micro-batch x accumulation x processes = global batch."""
    args = subject.args
    config = _mapping(getattr(args, "deepspeed", None))
    micro, accumulation = args.per_device_train_batch_size, args.gradient_accumulation_steps
    world = _world_size(subject)
    expected = {
        "train_micro_batch_size_per_gpu": (micro, "per_device_train_batch_size"),
        "gradient_accumulation_steps": (accumulation, "gradient_accumulation_steps"),
        "train_batch_size": (
            micro * accumulation * world,
            f"per_device_train_batch_size={micro} x gradient_accumulation_steps={accumulation} x {world} processes",
        ),
    }
    for name, (value, meaning) in expected.items():
        given = config.get(name, "auto")
        if given not in ("auto", value):
            yield Problem(
                "T109",
                f"deepspeed has {name}={given!r}, but {meaning} is {value}; write 'auto' in its place, or change one",
                subject.origin("deepspeed"),
            )


def _mapping(config: Any) -> dict[str, Any]:
    if isinstance(config, str | os.PathLike) and Path(config).is_file():
        try:
            return read_mapping(config)
        except ArgumentsError:
            return {}
    return config if isinstance(config, dict) else {}


def _world_size(subject: Subject) -> int:
    if subject.given_trainer is not None:
        return subject.trainer.strategy.world_size
    return subject.args.world_size
