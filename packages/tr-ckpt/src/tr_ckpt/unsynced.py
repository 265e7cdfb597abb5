"""Go on, in words, where a file system cannot say when something has reached the disk.

Some that are mounted through FUSE, 9p or SMB take no fsync of a folder, or of anything. All that is lost is the order
in which a power cut finds things on the disk: a process that is killed at any instant loses nothing there either.
"""

from __future__ import annotations

import errno
import logging
import os
from pathlib import Path

logger = logging.getLogger(__name__)

# "Not supported", in the ways that file systems say it. EIO is none of them: then the disk is at fault.
_UNSUPPORTED = frozenset({errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOTTY})
_OF_FOLDERS = _UNSUPPORTED | {errno.EBADF, errno.EISDIR}

# File systems, by device, of which it has been said.
_warned: set[tuple[int, bool]] = set()


def tolerated(error: OSError, path: Path, *, of_folder: bool = False) -> bool:
    """Whether an error says no more than that this file system syncs nothing of the kind; if so, warn of it once.

    Otherwise the error is given the path, for words that name it.

    Args:
        error: what syncing raised.
        path: what was to be synced.
        of_folder: whether it is a folder.
    """
    unsupported = error.errno in (_OF_FOLDERS if of_folder else _UNSUPPORTED)
    # Where a folder can be listed, but not opened to be synced, it is not the right to read it that is missing.
    if not unsupported and not (of_folder and error.errno in (errno.EACCES, errno.EPERM) and _can_be_listed(path)):
        error.filename = error.filename or str(path)
        return False
    _warn(error, path, of_folder=of_folder)
    return True


def notice(directory: Path) -> None:
    """Find out, before anything is written, whether the folder that is or will be at `directory` can be synced.

    An error of another kind is left to whoever writes there.
    """
    existing = next((path for path in (directory, *directory.parents) if os.path.isdir(path)), None)
    if existing is None or os.name == "nt":
        return
    try:
        descriptor = os.open(existing, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        tolerated(error, existing, of_folder=True)


def _can_be_listed(path: Path) -> bool:
    try:
        os.listdir(path)
    except OSError:
        return False
    return True


def _warn(error: OSError, path: Path, *, of_folder: bool) -> None:
    try:
        device = os.stat(path).st_dev
    except OSError:  # what it is told apart by is of no weight
        device = -1
    if (device, of_folder) in _warned:
        return
    _warned.add((device, of_folder))
    if of_folder:
        what, harm = f"{path} cannot be synced", "may be missing"
    else:
        what, harm = f"files in {path.parent} cannot be synced", "may be damaged, which a restore notices"
    logger.warning(
        "%s on this file system (%s): after a power cut the newest checkpoints %s, so keep more than one; a process "
        "that is killed loses nothing. Checkpoints on a local disk are safe from both",
        what, os.strerror(error.errno or 0), harm,
    )  # fmt: skip
