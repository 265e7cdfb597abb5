"""Say what can go wrong with a checkpoint."""

from __future__ import annotations

from tr_ckpt.printable import printable


class CheckpointError(ValueError):
    """A checkpoint that cannot be used, or a state that cannot be put into one.

    Its message may hold what a checkpoint says, and may be shown as it is, whoever made that: see `printable`.
    """

    def __init__(self, message: str = "") -> None:
        super().__init__(printable(message, lines=True))


class DamagedCheckpointError(CheckpointError):
    """A checkpoint whose files are not those that were written; the message names each of them."""


class UnreadableError(CheckpointError):
    """Something that could not be read, also when tried again; nothing is known of it, so it is not damaged.

    The message names it and what the system said. What it may be is neither skipped nor removed.
    """


class PushError(RuntimeError):
    """Something asked of the Hub that failed, also when tried again; the message says why and holds no token.

    Attributes:
        status: status of the Hub's answer; None if there was none.
        may_pass: whether the same may succeed later: the Hub or the way to it is at fault, not what was asked.
    """

    def __init__(self, message: str, *, status: int | None = None, may_pass: bool = False) -> None:
        super().__init__(printable(message, lines=True))
        self.status = status
        self.may_pass = may_pass


class SaveError(OSError):
    """A save that was given up: another rank could not write its share, or what is there could not be read.

    The message names the rank, or what could not be read.
    """


class FolderInUseError(OSError):
    """A folder that another run saves to; the message says which."""
