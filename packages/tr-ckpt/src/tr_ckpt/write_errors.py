"""Say what a failure of the file system means for a save, and what to do about it."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def explained(name: str, directory: Path) -> Iterator[None]:
    """Turn an error of the system inside the block into one of the same kind that says what was not saved.

    Args:
        name: of the checkpoint.
        directory: where it was to be.
    """
    try:
        yield
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
    errno.ENOENT: "it was removed while it was being written; keep other programs and clean-up jobs away from there",
}
