"""Save one checkpoint: take and write the state of each part on all ranks, commit it on rank 0."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from tr_ckpt import discovery, files, manifest, names, plan, processes, reads
from tr_ckpt.files import Unsynced
from tr_ckpt.folder_lock import FolderLock
from tr_ckpt.host_buffers import HostBuffers
from tr_ckpt.plan import FileToWrite, Held, Share
from tr_ckpt.rank_records import RankRecords, Written
from tr_ckpt.ranks import Ranks
from tr_ckpt.retention import Known
from tr_ckpt.staging import Staging

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Saving:
    """One save, in three stages: `begin`, `take` the state of each part, `finish`.

    In the foreground a part is written before the next one is taken, so that host memory holds the copies of one.
    In the background all are copied at one instant, and `finish` runs in any thread and without communication. Ranks
    that wait for a disk hear of each other meanwhile. After a failure the earlier checkpoints are intact and no
    leftovers remain.

    Args:
        directory: the folder of the checkpoints.
        prefix: the first part of their names.
        step: completed optimizer steps.
        ranks: this process among the others.
        known: what the run knows about the checkpoints there; the saved one is added.
        lock: the lock of the folder, which rank 0 claims.
        buffers: where tensors are copied to, to be written in the background; None writes them at once.

    Attributes:
        sequence: that of the checkpoint, on the rank that committed it; 0 before the commit.
    """

    def __init__(
        self,
        directory: Path,
        prefix: str,
        step: int,
        ranks: Ranks,
        known: Known,
        lock: FolderLock,
        *,
        buffers: HostBuffers | None = None,
    ) -> None:
        self.name = names.checkpoint_name(prefix, step)
        self.sequence = 0
        self._directory = directory
        self._prefix = prefix
        self._step = step
        self._ranks = ranks
        self._known = known
        self._lock = lock
        self._buffers = buffers
        self._what = f"{self.name} was not saved"
        self._staging = Staging(directory, self.name) if ranks.rank == 0 else None
        self._folder = directory  # until `begin`
        self._added: list[str] = []
        self._records: RankRecords | None = None
        self._unsynced = Unsynced()
        self._copied: list[FileToWrite] = []
        self._written: Written = {}

    def begin(self, parts: Iterable[str], write_extra: Callable[[Path], None] | None) -> None:
        """Make the temporary folder, on rank 0, and see it on all. Collective.

        Args:
            parts: the names of the parts.
            write_extra: adds files, on rank 0.

        Raises:
            OSError: the temporary folder cannot be made, or (`SaveError`) another rank failed.
            CheckpointError: a name cannot be that of a file.
        """

        def begin() -> tuple[Path, Path | None] | None:
            names.check_names(parts)
            if self._staging is None:
                return None
            with files.explain_save_errors(self.name, self._directory):
                self._lock.claim()
                self._added = self._staging.begin(write_extra)
                names.check_free(self._added, parts)
                if self._buffers is not None and self._ranks.total > 1:
                    self._records = RankRecords.make(self._directory, self.name, self._ranks.world_size)
            return self._staging.folder, None if self._records is None else self._records.folder

        with self._discarding():
            begun = self._apart(begin)[0]
            assert begun is not None  # rank 0's answer
            self._folder, records = begun
            if records is not None and self._records is None:
                self._records = RankRecords(self.name, records, self._ranks.rank)
            if self._ranks.total > 1:
                self._apart(self._require_folder)

    def take(self, given: Mapping[str, Any]) -> None:
        """Call `state_dict` of every part, and write what this rank has of it, or copy it. Collective.

        Raises:
            CheckpointError: a state holds a value that cannot be saved, or the ranks do not hold the same.
            Exception: what a `state_dict` raised on this rank.
            OSError: a file could not be written, or (`SaveError`) another rank failed.
        """
        with self._discarding():
            if self._buffers is not None:
                self._buffers.begin()
            for part, target in given.items():
                self._take(part, target)
            if self._buffers is not None:
                self._buffers.finish()
            if self._records is not None:
                self._records.processes = self._ranks.together(self._what, processes.this_process)
                self._records.lost = self._ranks.lost

    def _take(self, part: str, target: Any) -> None:
        held: Held | None = None

        def take() -> Share | None:
            nonlocal held
            held = plan.hold(part, target.state_dict(), self._ranks)
            return None if held is None else held.share

        shares = self._ranks.together(self._what, take)

        def planned() -> list[FileToWrite]:
            return plan.files_of(part, held, shares, self._ranks)

        if self._buffers is None:
            self._apart(lambda: self._write(planned()))
        else:
            self._ranks.together(self._what, partial(self._copy, planned, self._buffers))

    def _copy(self, planned: Callable[[], list[FileToWrite]], buffers: HostBuffers) -> None:
        self._copied.extend(file.copied(buffers) for file in planned())

    def finish(self) -> None:
        """Write what was copied, and wait until the checkpoint is committed. Collective in the foreground.

        Raises:
            OSError: it could not be written, here or (`SaveError`) on another rank.
        """
        with self._discarding():
            if self._records is None:
                written = self._apart(self._write_rest)
                self._apart(lambda: self._commit(written))
                return
            with self._records.giving_signs():  # rank 0 also while it waits and commits: others wait for it
                self._commit(self._records.exchange(self._write_rest))
        self._records.close()
        self._records.wait_for_rank_0()

    def _apart(self, work: Callable[[], T]) -> list[T]:
        return self._ranks.apart(self._what, work, give_up=self._unsynced.give_up)

    def _require_folder(self) -> None:
        with files.explain_save_errors(self.name, self._directory):
            if reads.is_folder(self._folder):
                return
        raise OSError(
            f"rank {self._ranks.rank} does not see {self._folder}, which rank 0 made; "
            "all ranks must save to one shared file system"
        )

    def _write(self, planned: Iterable[FileToWrite]) -> None:
        with files.explain_save_errors(self.name, self._directory):
            for file in planned:
                self._written.setdefault(file.part, {})[file.name] = file.write(self._folder, self._unsynced)

    def _write_rest(self) -> Written:
        self._write(self._copied)
        with files.explain_save_errors(self.name, self._directory):
            if self._staging is not None:
                self._written[""] = self._staging.seal(self._added, self._unsynced)
            self._unsynced.sync()
        return self._written

    def _commit(self, written: list[Written]) -> None:
        if self._staging is None:
            return
        with files.explain_save_errors(self.name, self._directory):
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
