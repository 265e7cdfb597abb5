"""Do what follows once a checkpoint is complete: tell the caller, and remove old ones."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from pathlib import Path

from tr_ckpt import catalogue, reading_back, retention
from tr_ckpt.catalogue import Found
from tr_ckpt.errors import DamagedCheckpointError

logger = logging.getLogger(__name__)


def warn_of_others(saved: Path, before: int | None, now: int) -> None:
    """Warn where somebody else has saved to the folder since this run did: the two remove each other's checkpoints.

    Args:
        saved: the checkpoint just saved.
        before: sequence of the one that this run saved before; None if this is its first.
        now: that of `saved`.
    """
    if before is not None and now > before + 1:
        logger.warning(
            "%s holds checkpoints that were saved since this run's last one, and not by it: two runs that save to one "
            "folder replace and remove each other's checkpoints; give each a folder of its own",
            saved.parent,
        )


def tell(on_commit: Callable[[Path], None] | None, folder: Path) -> None:
    """Call `on_commit`, if there is one, with a complete checkpoint's folder; what it raises is logged."""
    try:
        if on_commit is not None:
            on_commit(folder)
    except Exception:
        # What follows a checkpoint must not make it look lost.
        logger.exception("%s is saved, but what was to be done next failed", folder.name)


def prune(
    saved: Found, prefix: str, *, keep_last: int | None, keep_every: int | None, protected: Collection[int]
) -> None:
    """Remove the checkpoints beyond a limit, once the one just saved has been read back and is as it was written.

    Args:
        saved: the one just saved; those beside it are looked at.
        prefix: what their names begin with.
        keep_last: how many stay; None keeps all.
        keep_every: those whose step is a multiple of this stay and do not count.
        protected: steps that stay.
    """
    if keep_last is None or saved.step is None:
        return
    directory = saved.path.parent
    surplus = retention.superfluous(directory, prefix, keep_last, saved.step, protected, keep_every)
    if not surplus:
        return
    try:
        reading_back.verify(saved.path, catalogue.check_quickly(saved))
    except DamagedCheckpointError as error:
        logger.error("nothing is removed: %s, just saved, reads back damaged: %s", saved.name, error)
        return
    for found in surplus:
        try:
            retention.remove(found)
        except OSError as error:
            logger.error("%s could not be removed (%s); the next save tries again", found.name, error)
