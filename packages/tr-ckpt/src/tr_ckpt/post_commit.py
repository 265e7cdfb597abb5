"""Call the caller's hook once a checkpoint is complete, and remove old checkpoints."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from pathlib import Path

from tr_ckpt import discovery, part_files, reads, retention
from tr_ckpt.discovery import Found
from tr_ckpt.errors import DamagedCheckpointError, UnreadableError
from tr_ckpt.retention import Known

logger = logging.getLogger(__name__)


def warn_of_other_runs(saved: Path, before: int | None, now: int) -> None:
    """Warn if another run has saved to the folder since this run's last save: the two replace each other's checkpoints.

    Args:
        saved: the checkpoint just saved.
        before: sequence of this run's previous checkpoint; None if there is none.
        now: sequence of `saved`.
    """
    if before is not None and now > before + 1:
        logger.warning(
            "%s holds checkpoints that were saved since this run's last one, and not by it: two runs that save to one "
            "folder replace each other's checkpoints; give each a folder of its own",
            saved.parent,
        )


def run_on_commit(on_commit: Callable[[Path], None] | None, folder: Path) -> None:
    """Call `on_commit`, if there is one, with the folder of a complete checkpoint; log its exceptions."""
    try:
        if on_commit is not None:
            on_commit(folder)
    except Exception:
        # A failure of the callback must not suggest that the checkpoint is lost.
        logger.exception("%s is saved, but on_commit failed", folder.name)


def prune(
    saved: Found,
    prefix: str,
    known: Known,
    *,
    keep_last: int | None,
    keep_every: int | None,
    protected: Collection[int],
) -> None:
    """Remove the checkpoints beyond a limit, once the new one has been read back and is intact.

    A failed read is not repeated here: nothing is removed, and the next save tries again.

    Args:
        saved: the checkpoint that was just saved; those beside it may be removed.
        prefix: the first part of their names.
        known: what the run knows about them.
        keep_last: how many are kept; None keeps all.
        keep_every: checkpoints whose step is a multiple of this are kept and do not count.
        protected: steps that are kept.
    """
    if keep_last is None or saved.step is None:
        return
    try:
        with reads.at_once():
            surplus = _surplus(saved.path.parent, prefix, known, keep_last, saved.step, protected, keep_every)
            if surplus:
                part_files.verify(saved.path, discovery.check_quickly(saved))
    except UnreadableError as error:
        logger.warning("nothing is removed now, the next save tries again: %s", error)
        return
    except DamagedCheckpointError as error:
        logger.error("nothing is removed: %s, just saved, reads back damaged: %s", saved.name, error)
        return
    for found in surplus:
        try:
            retention.remove(found)
        except OSError as error:
            logger.error("%s could not be removed (%s); the next save tries again", found.name, error)


def _surplus(  # noqa: PLR0917  what `prune` was given
    directory: Path,
    prefix: str,
    known: Known,
    keep_last: int,
    newest: int,
    protected: Collection[int],
    keep_every: int | None,
) -> list[Found]:
    complete = retention.complete(directory, prefix)
    own = [found for age, found in complete if known.may_go(age)]
    if len(complete) > keep_last:
        known.say_what_stays(directory, [found for age, found in complete if not known.may_go(age)])
    return retention.superfluous(own, keep_last, newest, protected, keep_every)
