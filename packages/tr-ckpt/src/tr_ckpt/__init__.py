"""Atomic, verified checkpoints for any PyTorch training loop.

Names are imported on first use: the help and the errors of a command line come without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tr_ckpt.checkpointer import Checkpointer
    from tr_ckpt.errors import (
        CheckpointError,
        DamagedCheckpointError,
        FolderInUseError,
        PushError,
        SaveError,
        UnreadableError,
    )
    from tr_ckpt.hub.hub_callback import HubCallback
    from tr_ckpt.hub.hub_repository import HubRepository
    from tr_ckpt.restoring import Restored
    from tr_ckpt.rng_state import RNGState

__all__ = [
    "CheckpointError",
    "Checkpointer",
    "DamagedCheckpointError",
    "FolderInUseError",
    "HubCallback",
    "HubRepository",
    "PushError",
    "RNGState",
    "Restored",
    "SaveError",
    "UnreadableError",
]

# The module of each name; `if TYPE_CHECKING` above repeats it for editors and type checkers.
_ORIGINS = {
    "CheckpointError": "tr_ckpt.errors",
    "Checkpointer": "tr_ckpt.checkpointer",
    "DamagedCheckpointError": "tr_ckpt.errors",
    "FolderInUseError": "tr_ckpt.errors",
    "HubCallback": "tr_ckpt.hub.hub_callback",
    "HubRepository": "tr_ckpt.hub.hub_repository",
    "PushError": "tr_ckpt.errors",
    "RNGState": "tr_ckpt.rng_state",
    "Restored": "tr_ckpt.restoring",
    "SaveError": "tr_ckpt.errors",
    "UnreadableError": "tr_ckpt.errors",
}


def __getattr__(name: str) -> Any:
    if name in ("hf_import", "sharded"):  # `tr_ckpt.sharded`, without an import of its own
        return import_module(f"{__name__}.{name}")
    if name not in _ORIGINS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    value = getattr(import_module(_ORIGINS[name]), name)
    globals()[name] = value  # the next access does not call this function
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
