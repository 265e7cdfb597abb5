"""Save one checkpoint: capture the state at one instant, write it on all ranks, commit it on rank 0."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tr_ckpt import discovery, manifest, names, parts, reads
from tr_ckpt.errors import CheckpointError, explain_save_errors
from tr_ckpt.files import Unsynced
from tr_ckpt.folder_lock import FolderLock
from tr_ckpt.parts import CapturedPart, HostBuffers
from tr_ckpt.rank_records import RankRecords, Written
from tr_ckpt.ranks import Ranks
from tr_ckpt.retention import Known
from tr_ckpt.sharded import capturing
from tr_ckpt.sharded.capturing import TakenState
from tr_ckpt.staging import Staging
from tr_ckpt.tensor_file import find_distributed, may_exist

logger = logging.getLogger(__name__)

# The captured parts by name.
Captured = Iterable[tuple[str, CapturedPart]]


class Saving:
    """One save.

    It has three stages: capture the state, write this rank's share, commit on rank 0 what all ranks wrote. `make` runs
    the stages in turn, a part at a time. `capture` runs the first, and `finish` the others, in any thread and without
    communication. After a failure the earlier checkpoints are intact and no leftovers remain.

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
        self._taken = TakenStates(ranks)
        self._unsynced = Unsynced()

    def make(self, given: Mapping[str, Any], write_extra: Callable[[Path], None] | None) -> None:
        """Save the state of the parts `given`; at most one tensor is copied at a time.

        Raises:
            OSError: it could not be written, here or (`SaveError`) on another rank.
            CheckpointError: a state holds a value that cannot be saved.
        """
        try:
            self._begin(given, write_extra, in_background=False)
            written = self._ranks.together(self._what, lambda: self._write(self._captured(given, None)))
            self._ranks.together(self._what, lambda: self._commit(written))
        except BaseException:
            self._discard()
            raise

    def capture(
        self, given: Mapping[str, Any], write_extra: Callable[[Path], None] | None, buffers: HostBuffers
    ) -> Captured:
        """Copy the state of the parts `given`, which may change after this call.

        Raises:
            OSError: the temporary folder cannot be made, or (`SaveError`) another rank failed.
            CheckpointError: a state holds a value that cannot be saved.
        """
        captured: list[tuple[str, CapturedPart]] = []

        def copy() -> names.Process:
            buffers.begin()
            captured.extend(self._captured(given, buffers))
            buffers.finish()
            if self._records is not None:
                self._records.begin()
            return names.this_process()

        try:
            self._begin(given, write_extra, in_background=True)
            everyone = self._ranks.together(self._what, copy)
        except BaseException:
            self._discard()
            raise
        if self._records is not None:
            self._records.processes = everyone
            self._records.lost = self._ranks.lost
        return captured

    def finish(self, captured: Captured) -> None:
        """Write the captured state and wait until the checkpoint is committed.

        Raises:
            OSError: it could not be written, here or (`SaveError`) on another rank.
        """
        try:
            if self._records is None:
                self._commit([self._write(captured)])
            else:
                with self._records.giving_signs():  # rank 0 also while it waits and commits: others wait for it
                    self._commit(self._records.exchange(lambda: self._write(captured)))
        except BaseException:
            self._discard()
            raise
        if self._records is not None:
            self._records.close()
            self._records.wait_for_rank_0()

    def _begin(
        self, given: Mapping[str, Any], write_extra: Callable[[Path], None] | None, *, in_background: bool
    ) -> None:
        world_size = self._ranks.total

        def begin() -> tuple[Path, Path | None, bool] | None:
            parts.check_names(given)
            if self._staging is None:
                return None
            with explain_save_errors(self.name, self._directory):
                self._lock.claim()
                self._added = self._staging.begin(write_extra)
                parts.check_free(self._added, given)
                if in_background and world_size > 1:
                    self._records = RankRecords.make(self._directory, self.name)
            return self._staging.folder, None if self._records is None else self._records.folder, may_exist()

        begun = self._ranks.together(self._what, begin)[0]
        assert begun is not None  # rank 0's answer
        self._folder, records, in_shards = begun
        if records is not None and self._records is None:
            self._records = RankRecords(self.name, records, self._ranks.rank)
        if in_shards:
            self._taken.take(given, self._what)

    def _captured(self, given: Mapping[str, Any], buffers: HostBuffers | None) -> Iterator[tuple[str, CapturedPart]]:
        with explain_save_errors(self.name, self._directory):
            is_seen = reads.is_folder(self._folder)
        if not is_seen:
            raise OSError(
                f"rank {self._ranks.rank} does not see {self._folder}, which rank 0 made; "
                "all ranks must save to one shared file system"
            )
        failure: Exception | None = None
        for name, part in given.items():
            # On every rank, also after a failure on this one: `state_dict` may be collective.
            try:
                captured = self._taken.capture(name, part, buffers)
            except Exception as error:
                failure = failure or error
                continue
            if captured is not None:
                yield name, captured
        if failure is not None:
            raise failure

    def _write(self, captured: Captured) -> Written:
        written: Written = {}
        remaining = iter(captured)
        try:
            if self._staging is not None:
                with explain_save_errors(self.name, self._directory):
                    written[""] = self._staging.seal(self._added, self._unsynced)
            for name, part in remaining:
                with explain_save_errors(self.name, self._directory):
                    written[name] = part.write(self._folder, self._unsynced)
            with explain_save_errors(self.name, self._directory):
                self._unsynced.sync()
        except Exception:
            with contextlib.suppress(Exception):  # report the first failure, not this one
                for _ in remaining:  # other ranks call the remaining `state_dict`s, and may wait for this one
                    pass
            raise
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

    def _discard(self) -> None:
        self._unsynced.close()
        if self._staging is not None:
            self._staging.discard()
            if self._records is not None:
                self._records.close()


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


class TakenStates:
    """The states of one save, of which those with DTensors go into shards.

    Args:
        ranks: this process among the others.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._states: dict[str, Any] = {}
        self._taken: dict[str, TakenState] = {}
        self._shares: list[dict[str, Any]] = []

    def take(self, given: Mapping[str, Any], what: str) -> None:
        """Call `state_dict` of every part, and exchange once which shards each rank holds. Collective.

        Copies no tensor.

        Raises:
            Exception: what a `state_dict` raised on this rank.
            SaveError: it failed on another rank; the message begins with `what`.
        """

        def shares() -> dict[str, Any]:
            failure: Exception | None = None
            for name, part in given.items():
                try:
                    self._take(name, part)
                except Exception as error:  # other ranks call the remaining `state_dict`s, and may wait for this one
                    failure = failure or error
            if failure is not None:
                raise failure
            return {name: taken.share for name, taken in self._taken.items()}

        self._shares = self._ranks.together(what, shares)

    def _take(self, name: str, part: Any) -> None:
        state = part.state_dict()
        if name in parts.PER_RANK or next(find_distributed(state), None) is None:
            self._states[name] = state
        elif self._ranks.is_one_of_several:
            raise CheckpointError(
                f"{name} is held in shards, of which no machine has all; save to a file system that every machine "
                "sees, without save_on_each_node"
            )
        else:
            self._taken[name] = TakenState(name, self._ranks.rank, state)

    def capture(self, name: str, part: Any, buffers: HostBuffers | None) -> CapturedPart | None:
        """Capture what this rank writes of a part, as `parts.capture` does. Not collective.

        Raises:
            CheckpointError: the state holds a value that cannot be saved, or the ranks do not hold the same.
        """
        if any(name in held for held in self._shares):
            held = [shares.get(name) for shares in self._shares]
            capturing.agreed(name, held)  # also where this rank holds none
            return self._taken.pop(name).capture(held, buffers)
        # On every rank: `state_dict` may be collective.
        state = self._states.pop(name) if name in self._states else part.state_dict()
        ranks = self._ranks
        return parts.capture(name, ranks.number if name in parts.PER_RANK else ranks.rank, state, buffers)
