"""Distributed strategies for any PyTorch training loop.

Names are imported on first use: the help and the errors of a command line come without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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

# The module of each name; `if TYPE_CHECKING` above repeats it for editors and type checkers.
_ORIGINS = {
    "DDP": "tr_dist.ddp",
    "LaunchEnvironment": "tr_dist.environment",
    "Loop": "tr_dist.own_loops",
    "ProcessGroup": "tr_dist.process_group",
    "notebook_launcher": "tr_dist.launching.notebook",
    "rank_device": "tr_dist.environment",
    "read_environment": "tr_dist.environment",
}


def __getattr__(name: str) -> Any:
    if name not in _ORIGINS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    value = getattr(import_module(_ORIGINS[name]), name)
    globals()[name] = value  # the next access does not call this function
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
