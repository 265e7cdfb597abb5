"""Define the errors of checkpoints, explain failed writes, and escape foreign text in messages.

Text from a checkpoint or from the Hub passes through `printable` before it is shown. Some characters control a
terminal, and others are invisible.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
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


@contextmanager
def explain_save_errors(name: str, directory: Path) -> Iterator[None]:
    """Turn an error inside the block into one of the same kind that says what was not saved, and where.

    Args:
        name: the checkpoint.
        directory: its folder.
    """
    try:
        yield
    except UnreadableError as error:
        raise SaveError(f"{name} was not saved in {directory}: {error}") from error
    except CheckpointError as error:
        raise type(error)(f"{name} was not saved in {directory}: {error}") from error
    except OSError as error:
        if error.errno is None:  # raised by this package, and explained already
            raise
        raise OSError(error.errno, _explain(error, name, directory)) from error


def _explain(error: OSError, name: str, directory: Path) -> str:
    file = f" ({error.filename})" if error.filename else ""
    text = f"{name} was not saved in {directory}: {os.strerror(error.errno or 0)}{file}"
    remedy = _REMEDIES.get(error.errno or 0, "fix that, or save to another folder")
    if error.errno in _DISK_FULL:
        remedy += f" ({_free_space(directory)} are free)"
    return f"{text} — {remedy}"


def _free_space(directory: Path) -> str:
    try:
        return f"{shutil.disk_usage(directory).free:,} bytes"
    except OSError:
        return "unknown bytes"


_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)

_REMEDIES = {
    errno.ENOSPC: "free space there, keep fewer checkpoints, or save to another disk",
    errno.EDQUOT: "the quota is used up: free space there, keep fewer checkpoints, or save to another disk",
    errno.EROFS: "give a folder on a writable file system",
    errno.EACCES: "give this user the right to write there, or save to another folder",
    errno.EPERM: "give this user the right to write there, or save to another folder",
    errno.EFBIG: "raise the limit on the size of a file (ulimit -f), or save to another file system",
    errno.EIO: "the disk or the connection to it is failing: look at the system's log, and save to another disk",
    errno.ESTALE: "the shared file system was changed or mounted again: check it, then start the run again",
    errno.ETIMEDOUT: "the shared file system does not answer: check it, then start the run again",
    errno.EMFILE: "raise the limit on open files (ulimit -n), or close files that this program keeps open",
    errno.ENFILE: "raise the machine's limit on open files (fs.file-max), or close files in other programs",
    errno.ENOMEM: "the machine is out of memory: use less, or save to another file system",
    errno.ENAMETOOLONG: "give an output folder with a shorter path",
    errno.EXDEV: "the existing folder belongs to a lower layer of a container's file system and cannot be moved; save "
    "to another folder, or to a volume",
    errno.EEXIST: "another program made it at the same time: give this run a folder of its own",
    errno.ENOTEMPTY: "another program put files there at the same time: give this run a folder of its own",
    errno.ENOTDIR: "a file is in the place of a folder: move it, or save to another folder",
    errno.ELOOP: "links there lead in a circle: fix them, or save to another folder",
    errno.ENOENT: "it was removed while it was being written; keep other programs and clean-up jobs away from there",
}
