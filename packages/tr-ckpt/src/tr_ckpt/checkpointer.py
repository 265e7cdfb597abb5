"""Save and restore the state of a run: atomic, verified, without pickle."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from tr_ckpt import catalogue, manifest, names, parts, retention
from tr_ckpt.catalogue import Found
from tr_ckpt.errors import CheckpointError, DamagedCheckpointError
from tr_ckpt.files import FileRecord
from tr_ckpt.ranks import Ranks
from tr_ckpt.restoring import Restoring
from tr_ckpt.staging import Staging

logger = logging.getLogger(__name__)


class Stateful(Protocol):
    """What can be a part of a checkpoint: modules, optimizers, schedules, anything with these two methods."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state: nested dicts, lists, tuples, tensors, numbers, strings, bytes and None."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> object:
        """Take over a state that `state_dict` returned."""
        ...


class Checkpointer:
    """Keep checkpoints of a run in a folder, as `checkpoint-<step>`.

    A save appears whole or not at all, whenever the process is killed. A restore checks every byte before it
    changes anything. All ranks call every method, with the same parts in the same order, on a file system
    that all of them see. One run at a time saves to a folder; any number may restore from it meanwhile.

    Args:
        directory: where the checkpoints are; made at the first save.
        keep_last: how many complete checkpoints stay; None keeps all.
        rank: number of this process among those that save together.
        world_size: how many those are.
        gather_objects: takes a picklable value, returns those of all ranks in rank order. Needed with
            several.
        prefix: what the folders' names begin with.

    Raises:
        ValueError: an argument is out of its range.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        keep_last: int | None = None,
        rank: int = 0,
        world_size: int = 1,
        gather_objects: Callable[[Any], list[Any]] | None = None,
        prefix: str = "checkpoint",
    ) -> None:
        if keep_last is not None and keep_last < 1:
            raise ValueError(f"keep_last={keep_last} would keep no checkpoint; give 1 or more, or None to keep all")
        parts.check_names([prefix])
        self.directory = Path(directory).expanduser().absolute()
        self.keep_last = keep_last
        self.prefix = prefix
        self._ranks = Ranks(rank, world_size, gather_objects)

    @classmethod
    def from_arguments(cls, args: Any, collectives: Any) -> Checkpointer:
        """Return the checkpointer that `args.output_dir` and `args.save_total_limit` describe.

        Args:
            args: training arguments; a limit of None, 0 or less keeps all.
            collectives: has `rank`, `world_size` and `gather_objects(value)`.
        """
        limit = args.save_total_limit
        return cls(
            args.output_dir,
            keep_last=limit if limit is not None and limit > 0 else None,
            rank=collectives.rank,
            world_size=collectives.world_size,
            gather_objects=collectives.gather_objects if collectives.world_size > 1 else None,
        )

    def save(
        self,
        step: int,
        parts: Mapping[str, Stateful],
        *,
        write_extra: Callable[[Path], None] | None = None,
        protected: Sequence[int] = (),
    ) -> Path:
        """Write the state of all `parts` as the checkpoint of `step`, then remove those beyond the limit.

        The part named `rng` is saved by every rank, the others by rank 0. `state_dict` is called on every
        rank, so that it may communicate. An existing checkpoint of this step is replaced once the new one is
        complete.

        Args:
            step: completed optimizer steps, 0 or more.
            parts: what to save, by name; names become file names.
            write_extra: called on rank 0 with the folder, before anything else is in it, to add files.
            protected: steps that are not removed, whatever the limit.

        Returns:
            The checkpoint's folder.

        Raises:
            OSError: it could not be written, here or (`SaveError`) on another rank; what was there before is
                intact.
            CheckpointError: a state holds something that cannot be saved; the message says where.
        """
        name = names.checkpoint_name(self.prefix, step)
        if isinstance(step, bool) or not isinstance(step, int) or step < 0:
            raise CheckpointError(f"step={step!r} is no count of optimizer steps; give an integer of 0 or more")
        staging = Staging(self.directory, name) if self._ranks.rank == 0 else None
        try:
            self._write(staging, step, name, parts, write_extra)
        except BaseException:
            if staging is not None:
                staging.discard()
            raise
        # Together, so that no rank goes on while rank 0 is still removing.
        self._ranks.together(f"{name} was saved, but older ones remain", lambda: self._prune(step, protected))
        return self.directory / name

    def restore(self, parts: Mapping[str, Stateful], source: str | Path | None = None) -> int | None:
        """Load a checkpoint into `parts`, which may be fewer than were saved.

        Everything is read and checked, on all ranks, before the first part is changed. The random state of a
        rank that did not exist at the save is left as it is, with a warning.

        Args:
            parts: what to load, by the names of the save.
            source: a checkpoint, or a folder of checkpoints, of which the newest valid one is taken; None is
                this object's own folder. Damaged ones are passed over, each with a warning that names the
                damage.

        Returns:
            The checkpoint's step, or None if `source` is None and there is no valid checkpoint.

        Raises:
            CheckpointError: `source` is damaged or holds no checkpoint, or the checkpoint lacks one of
                `parts`, or a part does not take its state.
        """
        restoring = Restoring(parts, self._ranks, self.prefix)
        if source is None:
            return restoring.newest(self.directory)
        return restoring.explicit(Path(source).expanduser().absolute())

    def steps(self) -> list[int]:
        """Return the steps of all complete checkpoints, ascending. Checks sizes, reads no content."""
        complete = []
        for found in catalogue.find(self.directory, self.prefix):
            try:
                catalogue.check_quickly(found)
            except CheckpointError:
                continue
            complete.append(found.step)
        return complete

    def path(self, step: int) -> Path:
        """Return the folder of the checkpoint of `step`, whether it exists or not.

        It is `checkpoint-<step>`, except for one that a run was replacing when it was killed.
        """
        path = self.directory / names.checkpoint_name(self.prefix, step)
        if not path.exists():
            for found in catalogue.find(self.directory, self.prefix):
                if found.step == step:
                    return found.path
        return path

    def close(self) -> None:
        """Finish what is being written: nothing, as a save has finished when it returns."""

    def _write(
        self,
        staging: Staging | None,
        step: int,
        name: str,
        given: Mapping[str, Stateful],
        write_extra: Callable[[Path], None] | None,
    ) -> None:
        what = f"{name} was not saved"

        def begin() -> tuple[Path, dict[str, FileRecord]] | None:
            parts.check_names(given)
            if staging is None:
                return None
            extra = staging.begin(write_extra)
            parts.check_free(extra, given, self._ranks.world_size)
            return staging.folder, extra

        begun = self._ranks.together(what, begin)[0]
        assert begun is not None  # rank 0's answer
        folder, extra = begun
        written = self._ranks.together(what, lambda: self._write_parts(folder, given))

        def commit() -> None:
            if staging is not None:
                manifest.write(folder, manifest.describe(step, self._ranks.world_size, [{"": extra}, *written]))
                staging.commit()

        self._ranks.together(what, commit)

    def _write_parts(self, folder: Path, given: Mapping[str, Stateful]) -> dict[str, dict[str, FileRecord]]:
        if not folder.is_dir():
            raise OSError(
                f"rank {self._ranks.rank} does not see {folder}, which rank 0 made; "
                "all ranks must save to one shared file system"
            )
        written = {}
        for name, part in given.items():
            state = part.state_dict()
            if self._ranks.rank == 0 or name in parts.PER_RANK:
                written[name] = parts.write(folder, name, self._ranks.rank, state)
        return written

    def _prune(self, newest: int, protected: Sequence[int]) -> None:
        if self._ranks.rank != 0 or self.keep_last is None:
            return
        surplus = retention.superfluous(self.directory, self.prefix, self.keep_last, newest, protected)
        if not surplus:
            return
        saved = Found(newest, names.checkpoint_name(self.prefix, newest), self.path(newest))
        try:
            catalogue.verify(saved.path, catalogue.check_quickly(saved))
        except DamagedCheckpointError as error:
            logger.error("nothing is removed: %s, just saved, reads back damaged: %s", saved.name, error)
            return
        for found in surplus:
            try:
                retention.remove(found)
            except OSError as error:
                logger.error("%s could not be removed (%s); the next save tries again", found.name, error)
