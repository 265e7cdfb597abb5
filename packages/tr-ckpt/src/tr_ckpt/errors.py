"""Say what can go wrong with a checkpoint."""

from __future__ import annotations


class CheckpointError(ValueError):
    """A checkpoint that cannot be used, or a state that cannot be put into one."""


class DamagedCheckpointError(CheckpointError):
    """A checkpoint whose files are not those that were written; the message names each of them."""


class PushError(RuntimeError):
    """A push to the Hub that failed, also when tried again; the message says why and holds no token."""


class SaveError(OSError):
    """A save that was given up because another rank could not write its share; the message names the rank."""
