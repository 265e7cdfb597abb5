"""Save and restore the state of a run: atomic, verified, without pickle."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from tr_ckpt import discovery, files, names, reads, retention
from tr_ckpt.background import Background
from tr_ckpt.discovery import Found
from tr_ckpt.errors import CheckpointError, FolderInUseError, UnreadableError
from tr_ckpt.folder_lock import FolderLock
from tr_ckpt.host_buffers import HostBuffers
from tr_ckpt.hub import resume
from tr_ckpt.hub.hub_repository import HubRepository
from tr_ckpt.ranks import NodeRanks, Ranks
from tr_ckpt.restoring import Restored, Restoring
from tr_ckpt.retention import Known, Surplus
from tr_ckpt.saving import Saving, run_on_commit, warn_of_other_runs


class Stateful(Protocol):
    """A possible part of a checkpoint: a module, optimizer, schedule, or any object with these two methods."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state: nested dicts, lists, tuples, tensors, numbers, strings, bytes and None."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> object:
        """Load a state that `state_dict` returned."""
        ...


def _wait() -> None:
    """Let work that changes files end before an exception goes on."""


class Checkpointer:
    """Keep checkpoints of a run in a folder, as `checkpoint-<step>`.

    A save appears whole or not at all, whenever the process is killed. A restore checks every byte before it
    changes anything. All ranks call every method, with the same parts in the same order, on a shared file system.
    One run at a time saves to a folder, and locks it; any number may restore from it.

    With `asynchronous`, `save` returns once the state is copied to host memory, and a thread writes it. Every tensor
    may change in the meantime. The memory for one copy is held from the first save on. At most one save is under
    way: the next one waits for it. A failed write leaves the earlier checkpoints intact. It is logged as an error at
    once, and raised once, by the next call of `check`, `save`, `wait` or `close`. The interpreter exits only after
    the write under way has ended; a killed process loses that write alone.

    Args:
        directory: the folder of the checkpoints; made at the first save.
        keep_last: how many complete checkpoints to keep, of those that this object saved and those that are no newer
            than what it restored; others in the folder do not count and are kept. None keeps all.
        keep_every: checkpoints whose step is a multiple of this are always kept and do not count; None for no such
            rule.
        asynchronous: write in the background.
        rank: number of this process among those that save together.
        world_size: number of these processes.
        gather_objects: takes a picklable value, returns those of all ranks in rank order. Needed with
            several.
        local_rank: number of this process on its machine, if the machines share no file system: each then
            keeps whole checkpoints in its own `directory`, and all resume from a step that every machine has. The
            constructor is collective then.
        prefix: the first part of the folders' names.
        hub: returns the repository that `restore` reads with the source `hub`.
        lost_ranks: returns the ranks that the job has lost, and how that is known. A save in the background waits for
            them no longer than they give signs of writing.

    Attributes:
        restored: what the last `restore` did; None before one, and after one that raised.

    Raises:
        ValueError: an argument is out of its range.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        keep_last: int | None = None,
        keep_every: int | None = None,
        asynchronous: bool = False,
        rank: int = 0,
        world_size: int = 1,
        gather_objects: Callable[[Any], list[Any]] | None = None,
        local_rank: int | None = None,
        prefix: str = "checkpoint",
        hub: Callable[[], HubRepository] | None = None,
        lost_ranks: Callable[[], Mapping[int, str]] | None = None,
    ) -> None:
        if keep_last is not None and keep_last < 1:
            raise ValueError(f"keep_last={keep_last} would keep no checkpoint; give 1 or more, or None to keep all")
        if keep_every is not None and keep_every < 1:
            raise ValueError(f"keep_every={keep_every} is not a number of steps; give 1 or more, or None")
        names.check_names([prefix])
        self.directory = Path(directory).expanduser().absolute()
        self.keep_last = keep_last
        self.keep_every = keep_every
        self.asynchronous = asynchronous
        self.prefix = prefix
        self._ranks = Ranks(rank, world_size, gather_objects, lost_ranks)
        if local_rank is not None and gather_objects is not None:
            self._ranks = NodeRanks.find(rank, local_rank, world_size, gather_objects)
        self._hub = hub
        self.restored: Restored | None = None
        self._buffers = HostBuffers()
        self._background: Background | None = None  # made by the first save in the background
        self._lock = FolderLock(self.directory)
        weakref.finalize(self, self._lock.drop)
        self._sequence: int | None = None  # of this object's last checkpoint
        self._known = Known()

    @classmethod
    def from_arguments(cls, args: Any, collectives: Any) -> Checkpointer:
        """Return the checkpointer that `output_dir` and the `save_*` fields of `args` describe.

        Args:
            args: training arguments: `save_total_limit` (None, 0 or less keeps all) and, if they exist,
                `save_keep_every` and `save_async`.
            collectives: has `rank`, `world_size` and `gather_objects(value)`; `local_rank` where
                `save_on_each_node` is set. `lost_ranks()`, if it has that, says who need not be waited for.
        """
        limit = args.save_total_limit
        made = cls(
            args.output_dir,
            keep_last=limit if limit is not None and limit > 0 else None,
            keep_every=getattr(args, "save_keep_every", None),
            asynchronous=getattr(args, "save_async", False),
            rank=collectives.rank,
            world_size=collectives.world_size,
            gather_objects=collectives.gather_objects if collectives.world_size > 1 else None,
            local_rank=collectives.local_rank if getattr(args, "save_on_each_node", False) else None,
            hub=lambda: HubRepository.from_arguments(args),
            lost_ranks=getattr(collectives, "lost_ranks", None),
        )
        if made._ranks.rank == 0 and getattr(args, "save_strategy", None) != "no":
            files.warn_if_unsynced(made.directory)  # now, not at the first save
        return made

    def take_over(self, former: Checkpointer) -> None:
        """Save in place of an object of this process that saved among other ranks: one run has all checkpoints."""
        self._known, self._sequence = former._known, former._sequence

    def save(
        self,
        step: int,
        parts: Mapping[str, Stateful],
        *,
        write_extra: Callable[[Path], None] | None = None,
        protected: Sequence[int] = (),
        on_commit: Callable[[Path], None] | None = None,
    ) -> Path:
        """Write the state of all `parts` as the checkpoint of `step`, then remove those beyond the limit.

        Every rank saves the part named `rng`; rank 0 saves the others. `state_dict` is called on every rank, so that
        it may be collective. An existing checkpoint of this step is replaced once the new one is complete.

        Args:
            step: completed optimizer steps, 0 or more.
            parts: what to save, by name; names become file names.
            write_extra: called on rank 0 with the empty folder, to add files; always before this returns.
            protected: steps to keep, whatever the limit.
            on_commit: called on rank 0 with the folder of the complete checkpoint, before older ones are removed. It
                runs in the thread that writes and should be quick. Its exceptions are logged.

        Returns:
            The checkpoint's folder; when asynchronous it exists once `wait` has returned.

        Raises:
            OSError: it could not be written, here or (`SaveError`) on another rank; the earlier checkpoints are
                intact. When asynchronous: the previous save failed, and this one was not started.
            CheckpointError: a state holds a value that cannot be saved; the message says where.
        """
        name = names.checkpoint_name(self.prefix, step)
        if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step < 10**18:
            raise CheckpointError(f"step={step!r} is not a count of optimizer steps; give an integer of 0 or more")
        self._settle(self._hold_up)
        folder = self.directory / name
        buffers = self._buffers if self.asynchronous else None
        saving = Saving(self.directory, self.prefix, step, self._ranks, self._known, self._lock, buffers=buffers)
        saving.begin(parts, write_extra)
        saving.take(parts)

        def follow() -> Surplus | None:
            if self._ranks.rank != 0:
                return None
            return self._follow(Found(step, name, folder), saving.sequence, on_commit, protected)

        def finish() -> None:
            saving.finish()
            # All together, so that none continues while rank 0 is still removing; in the background others train on.
            ranks = Ranks() if self.asynchronous else self._ranks
            what = f"{name} was saved, but older ones remain"
            self._remove(what, ranks.apart(what, follow, give_up=_wait)[0], ranks)

        if not self.asynchronous:
            finish()
            return folder
        if self._background is None:
            self._background = Background()
        self._background.start(f"writing {name}", finish)
        return folder

    def _follow(
        self, saved: Found, sequence: int, on_commit: Callable[[Path], None] | None, protected: Sequence[int]
    ) -> Surplus | None:
        warn_of_other_runs(saved.path, self._sequence, sequence)
        self._sequence = sequence
        run_on_commit(on_commit if self._ranks.number == 0 else None, saved.path)
        if self.keep_last is None:
            return None
        limits = {"keep_last": self.keep_last, "keep_every": self.keep_every}
        return retention.surplus(saved, self.prefix, self._known, protected=protected, **limits)

    def _remove(self, what: str, surplus: Surplus | None, ranks: Ranks) -> None:
        """Remove older checkpoints, once each rank has read back its share of the new one. Collective for `ranks`."""
        if not any(ranks.across(surplus is not None)):
            return
        answers = ranks.apart(
            what, lambda: ("", "") if surplus is None else surplus.read_back(ranks.rank, ranks.world_size)
        )

        def remove() -> None:
            if surplus is not None and ranks.rank == 0:
                surplus.remove(answers, self._lock.check)

        ranks.apart(what, remove, give_up=_wait)

    def check(self) -> None:
        """Raise the failure of a background write, if one failed since the last call; does not wait.

        Each rank raises its own failures, rank 0 all of them.

        Raises:
            OSError: a checkpoint could not be written.
        """
        if self._background is not None:
            self._background.raise_failure()

    def wait(self) -> None:
        """Wait until no write is under way. Collective, when asynchronous.

        Raises:
            OSError: a checkpoint could not be written, here or (`SaveError`) on another rank; each failure is
                raised once.
        """
        self._settle(self._join)

    def close(self) -> None:
        """Do what `wait` does, and then unlock the folder for other runs.

        The write finishes without this call; the call raises its failure.
        """
        try:
            self.wait()
        finally:
            self.release()

    def claim(self) -> None:
        """Keep other runs from saving to the folder until `release` or `close`. Collective.

        Otherwise the first save does it. Waits while it is unclear whether another run is alive, and logs that.
        Calls that only read need no claim.

        Raises:
            FolderInUseError: another run saves to the folder; `SaveError` on the other ranks.
            OSError: the folder cannot be made, or its lock cannot be read.
        """

        def claim() -> None:
            if self._ranks.rank == 0:
                with files.explain_save_errors("the run's first checkpoint", self.directory):
                    try:
                        self._lock.claim()
                    except FolderInUseError as error:
                        if not self._ranks.is_one_of_several:
                            raise
                        hint = "; where the machines of a run share their file system, leave out save_on_each_node"
                        raise FolderInUseError(f"{error}{hint}") from error

        self._ranks.apart("no checkpoint could be saved", claim)

    def release(self) -> None:
        """Unlock the folder for other runs, once no write is under way; the next save claims it again."""
        self._join()
        self._lock.release()

    def restore(
        self,
        parts: Mapping[str, Stateful],
        source: str | Path | None = None,
        *,
        optional: Collection[str] = (),
        only_read: Collection[str] = (),
    ) -> int | None:
        """Load a checkpoint into `parts`, which may be fewer than were saved.

        All ranks read and check everything before the first part is changed. The random state of a rank that did not
        exist at the save stays unchanged, with a warning.

        Args:
            parts: what to load, by the names of the save.
            source: a checkpoint, or a folder of checkpoints, of which the newest valid one is taken; None is
                this object's own folder. Damaged ones are skipped, each with a warning that names the
                damage. `hub:OWNER/NAME` or `hub:OWNER/NAME@REVISION` downloads the newest valid one of a repository
                of the Hub: rank 0 looks up one commit and downloads to a temporary folder beside the checkpoints.
                `hub` alone is the repository that the constructor was given.
            optional: names of parts that stay unchanged if the checkpoint does not hold them.
            only_read: names of parts whose state is read and checked like the others, and stored in `restored.states`
                instead of loaded. They need not be in `parts`; if they are, the state of another program's
                checkpoint must fit them.

        Returns:
            The checkpoint's step; `restored` has more. None if `source` is None and there is no valid checkpoint.

        Raises:
            CheckpointError: `source` is damaged or holds no checkpoint; or the checkpoint lacks one of
                `parts` that is not optional; or a part rejects its state.
            UnreadableError: a checkpoint that may be the newest could not be read, also when tried again. Other ranks
                raise a `CheckpointError` that names this rank. No other checkpoint is taken instead.
        """
        if self.asynchronous:
            self._ranks.apart("nothing was restored", self._join)
        self.restored = None
        restoring = Restoring(parts, self._ranks, self.prefix, optional=optional, only_read=only_read)
        step = self._restore(restoring, source)
        self._known.restored = restoring.age_in(self.directory)
        self.restored = restoring.result()
        return step

    def _restore(self, restoring: Restoring, source: str | Path | None) -> int | None:
        if source is None:
            return restoring.newest(self.directory)
        if resume.is_address(source):
            if self._ranks.is_one_of_several:
                raise CheckpointError(
                    f"{source} is downloaded by one machine, and with save_on_each_node they share no file system; "
                    "download it on each, and name the folder"
                )
            with resume.fetched(str(source), self.directory, self.prefix, self._ranks, self._hub) as folder:
                return restoring.explicit(folder)
        return restoring.explicit(Path(source).expanduser().absolute())

    def steps(self) -> list[int]:
        """Return the steps of all complete checkpoints, ascending. Checks sizes, reads no content.

        Raises:
            UnreadableError: a checkpoint cannot be read.
        """
        self._hold_up()
        complete = []
        for found in discovery.find(self.directory, self.prefix):
            try:
                discovery.check_quickly(found)
            except UnreadableError:
                raise
            except CheckpointError:
                continue
            complete.append(found.step)
        return complete

    def path(self, step: int) -> Path:
        """Return the folder of the checkpoint of `step`, whether it exists or not.

        It is `checkpoint-<step>`, unless a run was killed while it replaced that one.

        Raises:
            UnreadableError: the folder cannot be read.
        """
        self._hold_up()
        path = self.directory / names.checkpoint_name(self.prefix, step)
        if not reads.is_there(path):
            for found in discovery.find(self.directory, self.prefix):
                if found.step == step:
                    return found.path
        return path

    def _hold_up(self) -> None:
        if self._background is not None:
            self._background.hold_up()

    def _settle(self, join: Callable[[], None]) -> None:
        """Wait for the write under way, and raise what failed, on all ranks. Collective, when asynchronous."""

        def settled() -> None:
            join()
            self.check()

        if self.asynchronous:
            self._ranks.apart("a write in the background failed", settled)
        else:
            settled()

    def _join(self) -> None:
        if self._background is not None:
            self._background.join()
