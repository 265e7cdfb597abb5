"""Remove a checkpoint that cannot be renamed first.

overlayfs, which containers run on, refuses (EXDEV) to rename a folder that comes from a lower layer, such as a
checkpoint that is part of the image. Its files can be renamed and removed. So its manifest goes first, in one instant,
to a folder beside it: from then on nothing there looks like a checkpoint, and whoever finds that folder completes the
removal (`complete`).
"""

from __future__ import annotations

import logging
import stat
from collections.abc import Iterator
from pathlib import Path

from tr_ckpt import files, manifest, names, reads
from tr_ckpt.errors import CheckpointError, UnreadableError

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
        UnreadableError: it cannot be found out what is there; the next save tries again.
    """
    rest = beside.parent / name
    is_emptied = reads.is_folder(rest) and not reads.is_there(rest / names.MANIFEST, follow=False)
    if is_emptied and reads.is_there(beside / names.MANIFEST, follow=False):
        if _is_rest(rest, beside):
            logger.info("removing what is left of %s: a run ended while it was removing it", name)
            _remove_rest(rest)
        else:
            logger.warning("%s stays: it is what is left of a removed checkpoint, and holds other files too", rest)
    files.remove_tree(beside)


def _remove_rest(folder: Path) -> None:
    if reads.is_there(folder / _OF_OTHER_PROGRAMS, follow=False):
        files.remove_file(folder / _OF_OTHER_PROGRAMS)
        files.sync_folder(folder)
    files.remove_tree(folder)
    files.sync_folder(folder.parent)


def _is_rest(folder: Path, beside: Path) -> bool:
    try:
        known = manifest.read(beside).files
    except UnreadableError:
        raise
    except CheckpointError:
        return False
    return all(path.relative_to(folder).as_posix() in known for path in _below(folder))


def _below(folder: Path) -> Iterator[Path]:
    for name in reads.names_in(folder):
        path = folder / name
        if stat.S_ISDIR(reads.status(path, follow=False).st_mode):
            yield from _below(path)
        else:
            yield path
