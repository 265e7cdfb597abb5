"""Decide which checkpoints are beyond the limit, and remove them.

A run removes its own checkpoints, the one it resumed from, and older ones: that one was read and verified. Other
checkpoints in the folder may have value, and are kept: those of another run, those skipped as damaged, those that
cannot be read now.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tr_ckpt import discovery, files, processes, reader, reads, staging
from tr_ckpt.discovery import Age, Found, Seen
from tr_ckpt.errors import CheckpointError, DamagedCheckpointError, FolderInUseError, UnreadableError, first_three

logger = logging.getLogger(__name__)

_CHECKED_AGAIN = 8  # so many of the newest checkpoints at each save, whatever is known of them


@dataclass
class Known:
    """What a run knows about the checkpoints in its folder.

    Attributes:
        restored: age of the one it resumed from; None if that is not in this folder.
        saved: ages of those it saved.
        seen: what was read of them.
        has_said: whether the warning about kept ones was logged.
    """

    restored: Age | None = None
    saved: set[Age] = field(default_factory=set)
    seen: Seen = field(default_factory=Seen)
    has_said: bool = False

    def may_go(self, age: Age) -> bool:
        """Whether the run may remove a checkpoint: it saved it, or resumed from it or from a newer one."""
        return age in self.saved or (self.restored is not None and age <= self.restored)

    def say_what_stays(self, directory: Path, staying: Sequence[Found]) -> None:
        """Warn, once, about complete checkpoints that no limit removes."""
        if not staying or self.has_said:
            return
        self.has_said = True
        logger.warning(
            "%s stay whatever the limit: this run neither saved them nor resumed from them or a newer one; "
            "`trainer ckpt prune %s` removes those that are not needed",
            first_three([found.name for found in staying]),
            directory,
        )


def complete(directory: Path, prefix: str, seen: Seen | None = None) -> list[tuple[Age, Found]]:
    """Return the complete checkpoints in `directory` with their ages, the oldest first.

    Damaged and unreadable ones and those of another program are left out.

    Args:
        directory: the folder to look in.
        prefix: the first part of the names of checkpoints.
        seen: what was read earlier. Of what did not change only the newest are checked again. Updated in place.

    Raises:
        UnreadableError: the folder cannot be listed.
    """
    seen = Seen() if seen is None else seen
    unchanged, to_check = seen.look(directory, prefix)
    unchanged.sort(key=lambda entry: entry.age)
    older, newest = unchanged[:-_CHECKED_AGAIN], unchanged[-_CHECKED_AGAIN:]
    listed = [(entry.age, entry.found) for entry in older if entry.is_complete]
    to_check += [entry.found for entry in (*(each for each in older if not each.is_complete), *newest)]
    seen.checked = {found.name for found in to_check}
    for found in to_check:
        identity = reads.identity(str(found.path))
        if (age := _age_if_complete(found)) is not None:
            listed.append((age, found))
            seen.note(found, identity, age, is_complete=True)
    return sorted(listed, key=lambda each: each[0])


def _age_if_complete(found: Found) -> Age | None:
    try:
        described = discovery.check_quickly(found, with_sections=False)
    except CheckpointError:
        return None
    return described.age


def superfluous(
    complete: Sequence[Found],
    keep_last: int,
    newest: int | None,
    protected: Collection[int],
    keep_every: int | None = None,
) -> list[Found]:
    """Return what to remove so that `keep_last` of the checkpoints given stay, the oldest first.

    The checkpoint of step `newest` and the `protected` ones always stay, even beyond the limit; both count towards it.
    Those whose step is a multiple of `keep_every` stay too and do not count.

    Args:
        complete: the checkpoints that count, the oldest first. Age is the order of saving, not the step: after a run
            resumed from an earlier step, its abandoned later steps are the oldest.
        keep_last: how many stay.
        newest: step of the last saved one.
        protected: steps that stay.
        keep_every: those whose step is a multiple of this stay and do not count; None for no such rule.
    """
    counted = [found for found in complete if keep_every is None or found.step is None or found.step % keep_every]
    removable = [found for found in counted if found.step != newest and found.step not in protected]
    return removable[: max(0, len(counted) - keep_last)]


def remove(found: Found) -> None:
    """Remove a checkpoint; at no instant does a partly removed one look complete.

    Raises:
        OSError: it could not be renamed, and is unchanged, or its new name could not be synced.
    """
    logger.debug("removing %s: it is beyond the limit", found.name)
    dropped = processes.temporary(found.path.parent, "removed", found.name)
    try:
        files.rename(found.path, dropped)
        # Otherwise a power cut could remove files but keep the name.
        files.sync_folder(found.path.parent)
    except OSError:
        processes.release(dropped)
        raise
    staging.discard(dropped)


@dataclass(frozen=True)
class Surplus:
    """What goes once the checkpoint that was just saved has been read back.

    Attributes:
        saved: the one just saved.
        found: those beyond the limit, the oldest first.
    """

    saved: Found
    found: Sequence[Found]

    def read_back(self, rank: int, world_size: int) -> tuple[str, str]:
        """Read a rank's share of the files of the new checkpoint. Not collective.

        A failed read is not repeated here: nothing is removed, and the next save tries again.

        Returns:
            Why it cannot be read, and how it is damaged; both are empty if it is intact.
        """
        folder = self.saved.path
        try:
            with reads.at_once():
                described = discovery.check_quickly(self.saved)
                wanted = described.files_to_verify((), rank, world_size)
                discovery.raise_if_damaged(discovery.damages(folder, described, wanted))
                if rank == 0:
                    discovery.raise_if_damaged(reader.problems(folder, described))
        except UnreadableError as error:
            return str(error), ""
        except DamagedCheckpointError as error:
            return "", str(error)
        return "", ""

    def remove(self, answers: Iterable[tuple[str, str]], look: Callable[[], None]) -> None:
        """Remove it, if no rank's share of the new checkpoint is damaged or unreadable.

        Args:
            answers: of `read_back`, of all ranks.
            look: called right before each removal, which it prevents by raising.

        Raises:
            FolderInUseError: another run has taken the folder over; what is there is its own.
        """
        unread, damaged = ("; ".join(dict.fromkeys(filter(None, texts))) for texts in zip(*answers, strict=True))
        if damaged:
            logger.error("nothing is removed: %s, just saved, reads back damaged: %s", self.saved.name, damaged)
        elif unread:
            logger.warning("nothing is removed now, the next save tries again: %s", unread)
        for found in () if damaged or unread else self.found:
            try:
                look()
                remove(found)
            except FolderInUseError:
                raise
            except OSError as error:
                logger.error("%s could not be removed (%s); the next save tries again", found.name, error)


def surplus(
    saved: Found,
    prefix: str,
    known: Known,
    *,
    keep_last: int,
    keep_every: int | None,
    protected: Collection[int],
) -> Surplus | None:
    """Return the checkpoints beyond a limit; None if there are none, or that cannot be known now.

    Args:
        saved: the checkpoint that was just saved; those beside it may be removed.
        prefix: the first part of their names.
        known: what the run knows about them.
        keep_last: how many are kept.
        keep_every: checkpoints whose step is a multiple of this are kept and do not count.
        protected: steps that are kept.
    """
    directory = saved.path.parent
    try:
        with reads.at_once():
            listed = complete(directory, prefix, known.seen)
            own = [found for age, found in listed if known.may_go(age)]
            if len(listed) > keep_last:
                known.say_what_stays(directory, [found for age, found in listed if not known.may_go(age)])
            beyond = superfluous(own, keep_last, saved.step, protected, keep_every)
            gone = [found for found in beyond if found.name in known.seen.checked or _age_if_complete(found)]
    except UnreadableError as error:
        logger.warning("nothing is removed now, the next save tries again: %s", error)
        return None
    return Surplus(saved, gone) if gone else None
