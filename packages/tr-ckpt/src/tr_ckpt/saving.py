"""Save one checkpoint: plan what is written at one instant, write it on all ranks, commit it on rank 0."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tr_ckpt import discovery, manifest, names, reads
from tr_ckpt.errors import explain_save_errors
from tr_ckpt.files import Unsynced
from tr_ckpt.folder_lock import FolderLock
from tr_ckpt.host_buffers import HostBuffers
from tr_ckpt.plan import FileToWrite, plan
from tr_ckpt.rank_records import RankRecords, Written
from tr_ckpt.ranks import Ranks
from tr_ckpt.retention import Known
from tr_ckpt.staging import Staging

logger = logging.getLogger(__name__)


class Saving:
    """One save.

    It has three stages: plan which files this rank writes, write them, commit on rank 0 what all ranks wrote. `plan`
    runs the first and `finish` the others; if the plan was copied, in any thread and without communication. After a
    failure the earlier checkpoints are intact and no leftovers remain.

    Args:
        directory: the folder of the checkpoints.
        prefix: the first part of their names.
        step: completed optimizer steps.
        ranks: this process among the others.
        known: what the run knows about the checkpoints there; the saved one is added.
        lock: the lock of the folder, which rank 0 claims.

    Attributes:
        sequence: that of the checkpoint, on the rank that committed it; 0 before the commit.
    """

    def __init__(self, directory: Path, prefix: str, step: int, ranks: Ranks, known: Known, lock: FolderLock) -> None:
        self.name = names.checkpoint_name(prefix, step)
        self.sequence = 0
        self._directory = directory
        self._prefix = prefix
        self._step = step
        self._ranks = ranks
        self._known = known
        self._lock = lock
        self._what = f"{self.name} was not saved"
        self._staging = Staging(directory, self.name) if ranks.rank == 0 else None
        self._folder = directory  # until `_begin`
        self._added: list[str] = []
        self._records: RankRecords | None = None
        self._unsynced = Unsynced()

    def plan(
        self, given: Mapping[str, Any], write_extra: Callable[[Path], None] | None, buffers: HostBuffers | None = None
    ) -> list[FileToWrite]:
        """Make the temporary folder, and return the files that this rank writes to it. Collective.

        Args:
            given: the parts, by name.
            write_extra: adds files, on rank 0.
            buffers: where tensors are copied to, so that they may change before `finish`, which is then called in the
                background; None copies nothing.

        Raises:
            OSError: the temporary folder cannot be made, or (`SaveError`) another rank failed.
            CheckpointError: a state holds a value that cannot be saved.
        """
        with self._discarding():
            self._begin(given, write_extra, in_background=buffers is not None)
            planned = plan(given, self._ranks, self._what, self._require_folder)
            return planned if buffers is None else self._copied(planned, buffers)

    def finish(self, planned: Sequence[FileToWrite]) -> None:
        """Write the files and wait until the checkpoint is committed. Collective, unless the plan was copied.

        At most one tensor is copied at a time.

        Raises:
            OSError: it could not be written, here or (`SaveError`) on another rank.
        """
        with self._discarding():
            if self._records is None:
                written = self._ranks.together(self._what, lambda: self._write(planned))
                self._ranks.together(self._what, lambda: self._commit(written))
                return
            with self._records.giving_signs():  # rank 0 also while it waits and commits: others wait for it
                self._commit(self._records.exchange(lambda: self._write(planned)))
        self._records.close()
        self._records.wait_for_rank_0()

    def _begin(
        self, given: Mapping[str, Any], write_extra: Callable[[Path], None] | None, *, in_background: bool
    ) -> None:
        def begin() -> tuple[Path, Path | None] | None:
            names.check_names(given)
            if self._staging is None:
                return None
            with explain_save_errors(self.name, self._directory):
                self._lock.claim()
                self._added = self._staging.begin(write_extra)
                names.check_free(self._added, given)
                if in_background and self._ranks.total > 1:
                    self._records = RankRecords.make(self._directory, self.name)
            return self._staging.folder, None if self._records is None else self._records.folder

        begun = self._ranks.together(self._what, begin)[0]
        assert begun is not None  # rank 0's answer
        self._folder, records = begun
        if records is not None and self._records is None:
            self._records = RankRecords(self.name, records, self._ranks.rank)

    def _copied(self, planned: Sequence[FileToWrite], buffers: HostBuffers) -> list[FileToWrite]:
        copies: list[FileToWrite] = []

        def copy() -> names.Process:
            buffers.begin()
            copies.extend(file.copied(buffers) for file in planned)
            buffers.finish()
            if self._records is not None:
                self._records.begin()
            return names.this_process()

        everyone = self._ranks.together(self._what, copy)
        if self._records is not None:
            self._records.processes = everyone
            self._records.lost = self._ranks.lost
        return copies

    def _require_folder(self) -> None:
        with explain_save_errors(self.name, self._directory):
            if reads.is_folder(self._folder):
                return
        raise OSError(
            f"rank {self._ranks.rank} does not see {self._folder}, which rank 0 made; "
            "all ranks must save to one shared file system"
        )

    def _write(self, planned: Sequence[FileToWrite]) -> Written:
        written: Written = {}
        with explain_save_errors(self.name, self._directory):
            if self._staging is not None:
                written[""] = self._staging.seal(self._added, self._unsynced)
            for file in planned:
                written.setdefault(file.part, {})[file.name] = file.write(self._folder, self._unsynced)
            self._unsynced.sync()
        return written

    def _commit(self, written: list[Written]) -> None:
        if self._staging is None:
            return
        with explain_save_errors(self.name, self._directory):
            sequence = discovery.next_sequence(self._directory, self._prefix, self._known.seen)
            described = manifest.describe(self._step, self._ranks.total, written, sequence=sequence)
            manifest.write(self._folder, described, self._unsynced)
            self._known.saved.add((sequence, self._step))  # before the rename: an error may follow it
            self._staging.commit(self._unsynced, self._lock.check)
            self.sequence = sequence

    @contextmanager
    def _discarding(self) -> Iterator[None]:
        """Leave nothing behind if the block fails."""
        try:
            yield
        except BaseException:
            self._unsynced.close()
            if self._staging is not None:
                self._staging.discard()
                if self._records is not None:
                    self._records.close()
            raise


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
