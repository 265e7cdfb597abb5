"""Say what a failure of the file system means for a save, and what to do about it."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tr_ckpt.errors import SaveError, UnreadableError


@contextmanager
def explained(name: str, directory: Path) -> Iterator[None]:
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
    if error.errno in _FULL:
        remedy += f" ({_free(directory)} are free)"
    return f"{text} — {remedy}"


def _free(directory: Path) -> str:
    try:
        return f"{shutil.disk_usage(directory).free:,} bytes"
    except OSError:
        return "unknown bytes"


_FULL = (errno.ENOSPC, errno.EDQUOT)

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
