"""Remove old checkpoints beyond a limit."""

from __future__ import annotations

import errno
import logging
from collections.abc import Collection
from pathlib import Path

from tr_ckpt import catalogue, files, in_place, names, staging
from tr_ckpt.catalogue import Found
from tr_ckpt.errors import CheckpointError

logger = logging.getLogger(__name__)


def superfluous(
    directory: Path,
    prefix: str,
    keep_last: int,
    newest: int,
    protected: Collection[int],
    keep_every: int | None = None,
) -> list[Found]:
    """Return what to remove so that `keep_last` complete checkpoints stay, the oldest first.

    Old is what was saved early, whatever its step: what a run left behind when it went back goes first. The one of
    step `newest` and the `protected` ones always stay, also where that makes more than the limit; both count towards
    it. Those whose step is a multiple of `keep_every` stay too and do not count. Damaged ones and those of other
    programs do not count and stay: nothing says that they are worthless.
    """
    complete = []
    for found in catalogue.by_age(directory, prefix):
        try:
            catalogue.check_quickly(found)
        except CheckpointError:
            continue
        if keep_every is None or found.step is None or found.step % keep_every:
            complete.append(found)
    removable = [found for found in complete if found.step != newest and found.step not in protected]
    return removable[: max(0, len(complete) - keep_last)]


def remove(found: Found) -> None:
    """Remove a checkpoint; at no instant does a part of it look like a whole one.

    Raises:
        OSError: it could not be renamed, and is as it was, or its new name could not be synced.
    """
    logger.info("removing %s: it is beyond the limit", found.name)
    dropped = names.temporary(found.path.parent, "removed", found.name)
    try:
        files.rename(found.path, dropped)
        # Or a power cut could take files from it and leave it its name.
        files.sync_folder(found.path.parent)
    except OSError as error:
        names.release(dropped)
        if error.errno != errno.EXDEV:
            raise
        in_place.remove(found.path)
        return
    staging.discard(dropped)
