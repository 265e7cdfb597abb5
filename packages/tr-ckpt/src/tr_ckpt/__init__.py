"""Atomic, verified checkpoints for any PyTorch training loop."""

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
