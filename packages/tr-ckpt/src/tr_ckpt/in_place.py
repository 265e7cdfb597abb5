"""Remove a checkpoint that cannot be renamed first.

overlayfs, which containers run on, refuses (EXDEV) to rename a folder that comes from a lower layer, such as a
checkpoint that is part of the image. Its files can be renamed and removed. So its manifest goes first, in one instant,
to a folder beside it: from then on nothing there looks like a checkpoint, and whoever finds that folder completes the
removal (`complete`).
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

from tr_ckpt import files, manifest, names
from tr_ckpt.errors import CheckpointError

logger = logging.getLogger(__name__)

# Without it, and with no manifest, a rest would look like the checkpoint of another program.
_OF_OTHER_PROGRAMS = "trainer_state.json"


def remove(checkpoint: Path) -> None:
    """Remove a checkpoint where it is; at no instant does a part of it look like a whole one.

    Raises:
        OSError: its manifest could not be moved, and it is as it was; or the rest could not be removed, and is no
            checkpoint any more: the next save tries again.
    """
    beside = names.temporary(checkpoint.parent, "emptied", checkpoint.name)
    try:
        files.make_folder(beside)
        files.sync_folder(checkpoint.parent)
        try:
            files.rename(checkpoint / names.MANIFEST, beside / names.MANIFEST)
        except OSError:
            files.remove_folder(beside)
            raise
        files.sync_folder(beside)
        files.sync_folder(checkpoint)
        _remove_rest(checkpoint)
        files.remove_tree(beside)
    finally:
        names.release(beside)


def complete(beside: Path, name: str) -> None:
    """Complete the removal of the checkpoint `name` that a process which is gone had begun.

    Args:
        beside: the folder that its manifest was moved to.
        name: of the checkpoint's folder.

    Raises:
        OSError: it could not be removed; the next save tries again.
    """
    rest = beside.parent / name
    if os.path.lexists(beside / names.MANIFEST) and rest.is_dir() and not os.path.lexists(rest / names.MANIFEST):
        if _is_rest(rest, beside):
            logger.info("removing what is left of %s: a run ended while it was removing it", name)
            _remove_rest(rest)
        else:
            logger.warning("%s stays: it is what is left of a removed checkpoint, and holds other files too", rest)
    files.remove_tree(beside)


def _remove_rest(folder: Path) -> None:
    if os.path.lexists(folder / _OF_OTHER_PROGRAMS):
        files.remove_file(folder / _OF_OTHER_PROGRAMS)
        files.sync_folder(folder)
    files.remove_tree(folder)
    files.sync_folder(folder.parent)


def _is_rest(folder: Path, beside: Path) -> bool:
    try:
        known = manifest.read(beside).files
    except CheckpointError:
        return False
    below = (path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir())
    return all(path.relative_to(folder).as_posix() in known for path in below)
