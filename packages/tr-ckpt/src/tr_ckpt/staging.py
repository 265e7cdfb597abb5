"""Make a folder appear whole or not at all.

A new checkpoint grows in a temporary folder beside its final place. `commit` makes it durable and renames it.
An older checkpoint of the same step steps aside first: between the two renames it is the one that counts
(`catalogue.py` finds it under its temporary name, `clear_abandoned` puts it back). Where it cannot be renamed, the new
one waits under such a name until the older has been removed in its place.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Iterable
from pathlib import Path

from tr_ckpt import catalogue, files, in_place, manifest, names, reads
from tr_ckpt.errors import CheckpointError, UnreadableError
from tr_ckpt.files import FileRecord
from tr_ckpt.printable import printable

logger = logging.getLogger(__name__)


class Staging:
    """A checkpoint being written, on the one rank that commits it.

    Args:
        directory: where checkpoints are; made if it is missing.
        name: the checkpoint's final name.
    """

    def __init__(self, directory: Path, name: str) -> None:
        self.directory = directory
        self.final = directory / name
        self.folder = names.temporary(directory, "writing", name)

    def begin(self, write_extra: Callable[[Path], None] | None) -> list[str]:
        """Make the temporary folder, let the caller add its files, and return their paths in it.

        Raises:
            OSError: a file cannot be written, or is a link or no plain file.
        """
        files.make_folders(self.directory)
        there = reads.names_in(self.directory)
        if not any(reads.is_there(self.directory / name / names.MANIFEST) for name in there):
            files.settle(self.directory)  # else the first save here has done it
        clear_abandoned(self.directory)
        files.make_folder(self.folder)
        if write_extra is None:
            return []
        write_extra(self.folder)
        return self._added(self.folder)

    def seal(self, added: Iterable[str]) -> dict[str, FileRecord]:
        """Make the files that the caller added durable, and return what they hold, by path.

        Raises:
            OSError: one cannot be read or synced.
        """
        sealed, folders = {}, set()
        for name in added:
            sealed[name] = files.seal_file(self.folder / name)
            folders.update(Path(name).parents)
        for folder in sorted(folders - {Path()}, reverse=True):
            files.sync_folder(self.folder / folder)
        return sealed

    def commit(self) -> Path:
        """Put the folder, its manifest written, in its final place, durably.

        Raises:
            OSError: it did not work; what was in that place is there still.
            UnreadableError: it could not be found out what is in that place, and all is as it was.
        """
        files.sync_folder(self.folder)
        try:
            aside = self._step_aside() if reads.is_there(self.final, follow=False) else None
        except OSError as error:
            if error.errno != errno.EXDEV or not reads.is_there(self.final / names.MANIFEST):
                raise
            self._replace_in_place()
            return self.final
        try:
            self._take_place(aside)
        finally:
            names.release(self.folder)
            if aside is not None:  # whatever happened: the next save puts it back or removes it
                names.release(aside)
        if aside is not None and aside.name.startswith(".tmp-") and _is_sound(self.final):
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

    def _replace_in_place(self) -> None:
        waiting = names.temporary(self.directory, "replaced", self.final.name)
        try:
            files.rename(self.folder, waiting)
            files.sync_folder(self.directory)
            catalogue.verify(waiting, manifest.read(waiting))
            # From one instant in here the new one counts.
            in_place.remove(self.final)
            files.rename(waiting, self.final)
            files.sync_folder(self.directory)
        except OSError:
            if waiting.exists() and (self.final / names.MANIFEST).exists():
                discard(waiting)
            raise
        finally:
            names.release(self.folder)
            names.release(waiting)

    def discard(self) -> None:
        """Remove the temporary folder, if it is there; a failure leaves it to the next save."""
        discard(self.folder)

    def _step_aside(self) -> Path:
        if reads.is_there(self.final / names.MANIFEST):
            aside = names.temporary(self.directory, "replaced", self.final.name)
        else:
            # Not a checkpoint of ours: another program's, perhaps the only copy. Never removed.
            number = 1
            while reads.is_there(aside := self.directory / f"{self.final.name}.replaced-{number}", follow=False):
                number += 1
            logger.warning("%s has no %s, so it is kept as %s", self.final, names.MANIFEST, aside.name)
        try:
            files.rename(self.final, aside)
        except OSError:
            names.release(aside)
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
    """Remove a temporary folder, if it is there; a failure is logged and leaves it to the next save."""
    try:
        files.remove_tree(folder)
    except FileNotFoundError:
        pass
    except OSError as error:
        logger.warning("%s could not be removed (%s); the next save tries again", folder, error)
    names.release(folder)


def clear_abandoned(directory: Path) -> None:
    """Clear away what dead processes left: put back what was about to be replaced, remove the rest.

    Raises:
        OSError: a checkpoint could not be put back.
        UnreadableError: it could not be found out what was left.
    """
    synced = False
    for left in names.temporaries(directory):
        if not left.is_abandoned():
            continue
        if left.kind == "emptied":  # sorted before those that wait for its place
            _complete(left)
            continue
        final = directory / left.target
        if left.kind == "replaced" and not reads.is_there(final / names.MANIFEST):
            _put_back(left, final)
            continue
        if left.kind == "replaced" and not _is_sound(final):
            continue
        if not synced:  # the rename that made this folder superfluous may not have reached the disk
            files.sync_folder(directory)
            synced = True
        logger.info("removing %s, left by a run that ended while it was working on it", printable(left.path.name))
        discard(left.path)


def cut_short(directory: Path, kind: str, target: str | None = None) -> list[Path]:
    """Return what processes left that ended while they worked on it, where no save comes to clear it away.

    Args:
        directory: where it is.
        kind: of `names.Temporary`.
        target: the name that it stands for; None for any.

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
        and left.is_abandoned()
    ]


def _is_sound(replacing: Path) -> bool:
    """Whether a checkpoint reads back as it was written, so that the one that it replaced may go."""
    try:
        with reads.at_once():
            catalogue.verify(replacing, manifest.read(replacing))
    except CheckpointError as error:
        logger.warning("the replaced %s stays, as the one in its place is not sound: %s", replacing.name, error)
        return False
    return True


def _put_back(left: names.Temporary, final: Path) -> None:
    if reads.is_there(final, follow=False):  # somebody else's; the checkpoint waits under the name it has
        return
    try:
        files.rename(left.path, final)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        return  # of a lower layer of overlayfs: it counts under the name that it has
    logger.warning("put %s back: the run that was replacing it ended before it had", printable(left.target))


def _complete(left: names.Temporary) -> None:
    try:
        in_place.complete(left.path, left.target)
    except (OSError, UnreadableError) as error:
        logger.warning("what is left of %s could not be removed (%s); the next save tries again", left.target, error)
