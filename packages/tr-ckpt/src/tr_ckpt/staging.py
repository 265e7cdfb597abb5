"""Make a checkpoint's folder appear whole or not at all.

A new checkpoint grows in a temporary folder beside its final place. `Staging.commit` makes it durable and renames it.
An older checkpoint of the same step steps aside first. Between the two renames the older one counts: `discovery.py`
finds it under its temporary name, and `clear_abandoned` puts it back.

overlayfs, which containers run on, refuses (EXDEV) to rename a folder of a lower layer, such as a checkpoint that is
part of the image. Its files can be renamed and removed. There the new checkpoint waits under a temporary name until
the older one is removed in place. `remove_in_place` first moves the older one's manifest, in one instant, to a folder
beside it. From then on nothing there looks like a checkpoint. Whoever finds that folder completes the removal with
`complete_removal`.
"""

from __future__ import annotations

import errno
import logging
import stat
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from tr_ckpt import discovery, files, manifest, names, reads
from tr_ckpt.errors import CheckpointError, UnreadableError, printable
from tr_ckpt.files import FileRecord

logger = logging.getLogger(__name__)

# Without it, and with no manifest, a rest would look like the checkpoint of another program.
_TRAINER_STATE = "trainer_state.json"


def remove_in_place(checkpoint: Path) -> None:
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


def complete_removal(beside: Path, name: str) -> None:
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
    if reads.is_there(folder / _TRAINER_STATE, follow=False):
        files.remove_file(folder / _TRAINER_STATE)
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
    return all(path.relative_to(folder).as_posix() in known for path in _files_below(folder))


def _files_below(folder: Path) -> Iterator[Path]:
    for name in reads.names_in(folder):
        path = folder / name
        if stat.S_ISDIR(reads.status(path, follow=False).st_mode):
            yield from _files_below(path)
        else:
            yield path


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
            files.fsync_parents(self.directory)  # else the first save here has done it
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
            discovery.verify(waiting, manifest.read(waiting))
            # From one instant in here the new one counts.
            remove_in_place(self.final)
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
            _finish_removal(left)
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
            discovery.verify(replacing, manifest.read(replacing))
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


def _finish_removal(left: names.Temporary) -> None:
    try:
        complete_removal(left.path, left.target)
    except (OSError, UnreadableError) as error:
        logger.warning("what is left of %s could not be removed (%s); the next save tries again", left.target, error)
