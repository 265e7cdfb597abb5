"""Commit a checkpoint's folder whole or not at all.

A new checkpoint is written to a temporary folder beside its final path. `Staging.commit` makes it durable and renames
it. An older checkpoint of the same step is renamed aside first. Between the two renames the older one counts:
`discovery.py` finds it under its temporary name, and `clear_abandoned` restores its name.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from pathlib import Path

from tr_ckpt import discovery, files, manifest, names, processes, reads
from tr_ckpt.errors import CheckpointError
from tr_ckpt.files import FileRecord, Unsynced
from tr_log.formatting import printable

logger = logging.getLogger(__name__)


class Staging:
    """A checkpoint being written, on the rank that commits it.

    Args:
        directory: the folder of the checkpoints; made if it does not exist.
        name: the checkpoint's final name.
    """

    def __init__(self, directory: Path, name: str) -> None:
        self.directory = directory
        self.final = directory / name
        self.folder = processes.temporary(directory, "writing", name)

    def begin(self, write_extra: Callable[[Path], None] | None) -> list[str]:
        """Make the temporary folder, let the caller add its files, and return their paths in it.

        Raises:
            OSError: a file cannot be written, or is a link or not a regular file.
        """
        files.make_folders(self.directory)
        there = reads.names_in(self.directory)
        if not any(reads.is_there(self.directory / name / names.MANIFEST) for name in there):
            files.fsync_parents(self.directory)  # otherwise the first save here has done it
        clear_abandoned(self.directory, there)
        files.make_folder(self.folder)
        if write_extra is None:
            return []
        write_extra(self.folder)
        return self._added(self.folder)

    def seal(self, added: Iterable[str], unsynced: Unsynced | None = None) -> dict[str, FileRecord]:
        """Sync the files that the caller added, here or by `unsynced`, and return their records, by path.

        Raises:
            OSError: a file cannot be read or synced.
        """
        sealed, folders = {}, set()
        for name in added:
            sealed[name] = files.seal_file(self.folder / name, unsynced)
            folders.update(Path(name).parents)
        for folder in sorted(folders - {Path()}, reverse=True):
            files.sync_folder(self.folder / folder)
        return sealed

    def commit(self, unsynced: Unsynced | None = None, look: Callable[[], None] = lambda: None) -> Path:
        """Rename the folder, which holds its manifest, to its final path, durably, once `unsynced` is synced.

        Args:
            unsynced: what is synced first.
            look: called right before something that has a place is moved or removed, which it prevents by raising: a
                sync, or reading back, may wait for a disk for longer than a lock lasts.

        Raises:
            Exception: what `look` raised.
            OSError: it failed; what was at that path is still there.
            UnreadableError: the final path cannot be read, and nothing was changed.
        """
        (unsynced or Unsynced()).sync(self.folder)
        look()
        aside = self._step_aside() if reads.is_there(self.final, follow=False) else None
        try:
            self._take_place(aside)
        finally:
            processes.release(self.folder)
            if aside is not None:  # also after an error: the next save restores or removes it
                processes.release(aside)
        if aside is not None and aside.name.startswith(".tmp-") and _is_sound(self.final):
            look()
            discard(aside)
        return self.final

    def _take_place(self, aside: Path | None) -> None:
        try:
            files.rename(self.folder, self.final)
        except OSError:
            if aside is not None:
                files.rename(aside, self.final)
            raise
        files.sync_folder(self.directory)

    def discard(self) -> None:
        """Remove the temporary folder, if it exists; after a failure the next save removes it."""
        discard(self.folder)

    def _step_aside(self) -> Path:
        if reads.is_there(self.final / names.MANIFEST):
            aside = processes.temporary(self.directory, "replaced", self.final.name)
        else:
            # A checkpoint of another program, perhaps the only copy. Never removed.
            number = 1
            while reads.is_there(aside := self.directory / f"{self.final.name}.replaced-{number}", follow=False):
                number += 1
            logger.warning("%s has no %s, so it is kept as %s", self.final, names.MANIFEST, aside.name)
        try:
            files.rename(self.final, aside)
        except OSError:
            processes.release(aside)
            raise
        return aside

    def _added(self, folder: Path) -> list[str]:
        added: list[str] = []
        for path in sorted(folder.iterdir()):
            if path.is_symlink() or not (path.is_dir() or path.is_file()):
                raise OSError(f"{path.relative_to(self.folder)} is a link or no plain file; write_extra must copy it")
            added += self._added(path) if path.is_dir() else [path.relative_to(self.folder).as_posix()]
        return added


def discard(folder: Path) -> None:
    """Remove a temporary folder, if it exists; a failure is logged, and the next save removes it."""
    try:
        files.remove_tree(folder)
    except FileNotFoundError:
        pass
    except OSError as error:
        logger.warning("%s could not be removed (%s); the next save tries again", folder, error)
    processes.release(folder)


def clear_abandoned(directory: Path, listed: Iterable[str] | None = None) -> None:
    """Clear away leftovers of dead processes: restore a checkpoint that was being replaced, remove the rest.

    Args:
        directory: the folder of the checkpoints.
        listed: the names in it, sorted; None reads them.

    Raises:
        OSError: a checkpoint could not be restored.
        UnreadableError: a leftover could not be read.
    """
    synced = False
    for left in names.temporaries(directory, listed):
        if not processes.is_abandoned(left):
            continue
        final = directory / left.target
        if left.kind == "replaced" and not reads.is_there(final / names.MANIFEST):
            _put_back(left, final)
            continue
        if left.kind == "replaced" and not _is_sound(final):
            continue
        if not synced:  # the rename that replaced this folder may not have reached the disk
            files.sync_folder(directory)
            synced = True
        logger.info("removing %s, left by a run that ended while it was working on it", printable(left.path.name))
        discard(left.path)


def cut_short(directory: Path, kind: str, target: str | None = None) -> list[Path]:
    """Return leftovers of processes that ended, in folders where no save will clear them away.

    Args:
        directory: the folder to look in.
        kind: as in `names.Temporary`.
        target: the name that the leftover belongs to; None for any.

    Raises:
        UnreadableError: the folder cannot be listed.
    """
    # An export that replaces another works on a temporary folder of a temporary folder.
    nested = f".tmp-{kind}-{target}@"
    return [
        left.path
        for left in names.temporaries(directory)
        if left.kind == kind
        and (target is None or left.target == target or left.target.startswith(nested))
        and processes.is_abandoned(left)
    ]


def _is_sound(replacing: Path) -> bool:
    """Whether a checkpoint reads back as it was written, so that its predecessor may be removed."""
    try:
        with reads.at_once():
            discovery.verify(replacing, manifest.read(replacing))
    except CheckpointError as error:
        logger.warning("the replaced %s stays, as the one in its place is not sound: %s", replacing.name, error)
        return False
    return True


def _put_back(left: names.Temporary, final: Path) -> None:
    if reads.is_there(final, follow=False):  # another program's folder; the checkpoint keeps its temporary name
        return
    files.rename(left.path, final)
    logger.warning("restored %s: a run ended while it was replacing it", printable(left.target))
