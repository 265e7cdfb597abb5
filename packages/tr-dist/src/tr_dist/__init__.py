"""Distributed strategies for any PyTorch training loop."""

from tr_dist.ddp import DDP
from tr_dist.environment import LaunchEnvironment, rank_device, read_environment
from tr_dist.launching.notebook import notebook_launcher
from tr_dist.own_loops import Loop
from tr_dist.process_group import ProcessGroup

__all__ = [
    "DDP",
    "LaunchEnvironment",
    "Loop",
    "ProcessGroup",
    "notebook_launcher",
    "rank_device",
    "read_environment",
]
