"""Define the errors of checkpoints, and escape foreign text in messages.

Text from a checkpoint or from the Hub passes through `printable` before it is shown. Some characters control a
terminal, and others are invisible.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from tr_log.formatting import printable


def first_three(names: Sequence[str]) -> str:
    """Return the first three names, and how many more there are."""
    rest = len(names) - 3
    return ", ".join(names[:3]) + (f" and {rest} more" if rest > 0 else "")


class CheckpointError(ValueError):
    """A checkpoint that cannot be used, or a state that cannot be saved in one.

    The message may quote a checkpoint of any origin. It is safe to print: see `printable`.
    """

    def __init__(self, message: str = "") -> None:
        super().__init__(printable(message, lines=True))


@dataclass(frozen=True)
class Damage:
    """What is wrong with a checkpoint.

    Attributes:
        file: its path in the checkpoint; empty if it is not one file.
        kind: `content` if it is not what was written, `form` if it is, but cannot be loaded, `gone` if the checkpoint
            was removed while it was read.
        text: that in words, with the file's name.
    """

    file: str
    kind: Literal["content", "form", "gone"]
    text: str


class DamagedCheckpointError(CheckpointError):
    """A checkpoint whose files differ from those that were written; the message names each of them.

    Attributes:
        damages: what is wrong, one for each file.
    """

    def __init__(self, message: str = "", damages: Sequence[Damage] = ()) -> None:
        super().__init__(message or "; ".join(damage.text for damage in damages))
        self.damages = tuple(damages) or (Damage("", "content", message),)


class UnreadableError(CheckpointError):
    """A read failed, also when it was repeated. The content is unknown, so it does not count as damaged.

    The message names the file and the error of the system. A checkpoint in this state is neither skipped nor removed.
    """


class PushError(RuntimeError):
    """A request to the Hub failed, also when it was repeated; the message says why and holds no token.

    Attributes:
        status: status of the Hub's answer; None if there was none.
        may_pass: whether the same request may succeed later: the fault is at the Hub or the connection.
    """

    def __init__(self, message: str, *, status: int | None = None, may_pass: bool = False) -> None:
        super().__init__(printable(message, lines=True))
        self.status = status
        self.may_pass = may_pass


class SaveError(OSError):
    """A save was given up: another rank could not write its share, or existing files could not be read.

    The message names the rank or the file.
    """


class FolderInUseError(OSError):
    """Another run saves to the folder; the message says which."""
