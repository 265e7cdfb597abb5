"""Remove old checkpoints beyond a limit."""

from __future__ import annotations

import logging
from collections.abc import Collection
from pathlib import Path

from tr_ckpt import catalogue, files, names, staging
from tr_ckpt.catalogue import Found
from tr_ckpt.errors import CheckpointError

logger = logging.getLogger(__name__)


def superfluous(directory: Path, prefix: str, keep_last: int, newest: int, protected: Collection[int]) -> list[Found]:
    """Return what to remove so that `keep_last` complete checkpoints stay, the oldest first.

    The one of step `newest` and the `protected` ones always stay, also where that makes more than the limit.
    Damaged ones and those of other programs do not count and stay: nothing says that they are worthless.
    """
    complete = []
    for found in catalogue.find(directory, prefix):
        try:
            catalogue.check_quickly(found)
        except CheckpointError:
            continue
        complete.append(found)
    removable = [found for found in complete if found.step != newest and found.step not in protected]
    return removable[: max(0, len(complete) - keep_last)]


def remove(found: Found) -> None:
    """Remove a checkpoint; at no instant does a part of it look like a whole one.

    Raises:
        OSError: it could not be renamed; it is then as it was.
    """
    logger.info("removing %s: it is beyond the limit", found.name)
    dropped = names.temporary(found.path.parent, "removed", found.name)
    try:
        files.rename(found.path, dropped)
    except OSError:
        names.release(dropped)
        raise
    staging.discard(dropped)
