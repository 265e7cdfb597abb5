"""Bring strategies and process groups into conditions of other machines, and read the files of other launchers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from tr_dist.base import OnDevice
from tr_dist.deepspeed.configuration import fill_from_arguments, fill_from_model, read_configuration
from tr_dist.launching.accelerate_file import interpret, read_file
from tr_dist.launching.launch import Launch
from tr_dist.process_group import here


def set_loss_scaler(strategy: OnDevice, scaler: torch.amp.GradScaler) -> OnDevice:
    """Scale losses as under float16 on an accelerator, whatever the device and precision; returns the strategy."""
    strategy._precision.scaler = scaler
    return strategy


def abandon_group() -> None:
    """Leave the process group to its user, as one that was joined before this package was imported."""
    here.is_made_here = False


def described_launch(path: Path) -> str:
    """Return the job that a configuration file of another launcher describes, secrets masked.

    Raises:
        ValueError: the file is not valid, or describes what cannot be started.
    """
    settings = interpret(read_file(str(path)), "x")
    nodes: dict[str, Any] = {"max_nodes": settings.nnodes, "endpoint": f"{settings.host}:{settings.port}"}
    return Launch(("x.py",), nproc=settings.nproc or 1, variables=settings.variables, **nodes).described()


def filled_configuration(
    source: dict[str, Any] | Path, args: Any = None, world_size: int = 1, model: nn.Module | None = None
) -> dict[str, Any]:
    """Return a DeepSpeed configuration with values in place of `auto`, as a run with these arguments uses it.

    Args:
        source: a configuration, or a JSON file of one.
        args: the training arguments; None leaves `auto`.
        world_size: number of processes.
        model: gives the sizes that follow its hidden size; None leaves them.

    Raises:
        ValueError: the file is not valid, or the configuration contradicts the arguments.
    """
    filled = read_configuration(source)
    if args is not None:
        filled = fill_from_arguments(filled, args, world_size)
    return filled if model is None else fill_from_model(filled, model)
