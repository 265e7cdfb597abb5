"""Keep reads inside a checkpoint: nothing in it, whoever made it, leads to a file elsewhere.

A checkpoint may be anybody's: downloaded, unpacked, taken from a shared disk. Names in it are checked before they are
used (`path_names.py`), and a link, which such an archive can hold too, is not followed.
"""

from __future__ import annotations

import stat
from pathlib import Path, PurePosixPath

from tr_ckpt import reads
from tr_ckpt.errors import CheckpointError


def wrong_kind(folder: Path, name: str) -> str:
    """Return what is wrong with a file's kind in words; empty if it is a plain file in plain folders.

    Raises:
        OSError: there is none.
        UnreadableError: it cannot be looked at.
    """
    path, mode = folder, 0
    for step in PurePosixPath(name).parts:
        path = path / step
        mode = reads.status(path, follow=False).st_mode
        if stat.S_ISLNK(mode) and _is_in_cache_of_hub(path):
            mode = reads.status(path).st_mode
        if stat.S_ISLNK(mode):
            return "is a link, which may lead anywhere; copy the checkpoint with its links followed"
    return "" if stat.S_ISREG(mode) else "is no plain file"


def require(path: Path) -> None:
    """Refuse to read what is there but is no plain file.

    Raises:
        CheckpointError: the message names it.
        UnreadableError: it cannot be looked at.
    """
    try:
        problem = wrong_kind(path.parent, path.name)
    except OSError:
        return  # whoever reads it says why it cannot
    if problem:
        raise CheckpointError(f"{path.name} {problem}")


def _is_in_cache_of_hub(link: Path) -> bool:
    """Whether a link leads from a snapshot that huggingface_hub downloaded to a file of the same repository's."""
    try:
        blobs = reads.resolved(link).parent
        return blobs.name == "blobs" and reads.resolved(link.parent).is_relative_to(blobs.parent / "snapshots")
    except OSError:  # it leads nowhere, or to itself
        return False
