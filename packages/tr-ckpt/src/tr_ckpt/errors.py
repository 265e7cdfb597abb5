"""Define the errors of checkpoints, escape text from outside in messages, and explain failed writes.

Text from a checkpoint or from the Hub passes `printable` before anybody sees it. A terminal obeys some characters, and
a reader does not see others. `explain_save_errors` says what was not saved, why, and what to do about it.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def printable(text: object, *, lines: bool = False) -> str:
    r"""Return text with everything that is not printed as itself written as Python writes it: ESC as `\x1b`.

    That is what moves the cursor, sets colours, titles or the clipboard, turns the direction of writing or has no
    width, and half characters. Text that was made so stays as it is when it is made so again.

    Args:
        text: what is to be shown; its `str` is taken.
        lines: whether line breaks and tabs stay.
    """
    text = str(text)
    if text.isprintable():
        return text
    kept = "\n\t" if lines else ""
    return "".join(
        each if each.isprintable() or each in kept else each.encode("unicode_escape").decode() for each in text
    )


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


@contextmanager
def explain_save_errors(name: str, directory: Path) -> Iterator[None]:
    """Turn an error of the system inside the block into one of the same kind that says what was not saved.

    Args:
        name: of the checkpoint.
        directory: where it was to be.
    """
    try:
        yield
    except UnreadableError as error:
        raise SaveError(f"{name} was not saved in {directory}: {error}") from error
    except OSError as error:
        if error.errno is None:  # one of ours, which says it
            raise
        raise OSError(error.errno, _explain(error, name, directory)) from error


def _explain(error: OSError, name: str, directory: Path) -> str:
    file = f" ({error.filename})" if error.filename else ""
    text = f"{name} was not saved in {directory}: {os.strerror(error.errno or 0)}{file}"
    remedy = _REMEDIES.get(error.errno or 0, "mend that, or save to another folder")
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
    errno.EROFS: "give a folder on a file system that can be written to",
    errno.EACCES: "give this user the right to write there, or save to another folder",
    errno.EPERM: "give this user the right to write there, or save to another folder",
    errno.EFBIG: "raise the limit on the size of a file (ulimit -f), or save to another file system",
    errno.EIO: "the disk or the way to it is failing: look at the system's log, and save to another disk",
    errno.ESTALE: "the shared file system was changed or mounted again: see to it, then start the run again",
    errno.ETIMEDOUT: "the shared file system does not answer: see to it, then start the run again",
    errno.EMFILE: "raise the limit on open files (ulimit -n), or close files that this program keeps open",
    errno.ENFILE: "raise the machine's limit on open files (fs.file-max), or close files in other programs",
    errno.ENOMEM: "the machine is out of memory: use less, or save to another file system",
    errno.ENAMETOOLONG: "give an output folder with a shorter path",
    errno.EXDEV: "what is there belongs to a lower layer of a container's file system and cannot be moved; save to "
    "another folder, or to a volume",
    errno.EEXIST: "another program made it meanwhile: give this run a folder of its own",
    errno.ENOTEMPTY: "another program put files there meanwhile: give this run a folder of its own",
    errno.ENOTDIR: "a file is in the place of a folder: move it, or save to another folder",
    errno.ELOOP: "links there lead in a circle: mend them, or save to another folder",
    errno.ENOENT: "it was removed while it was being written; keep other programs and clean-up jobs away from there",
}
