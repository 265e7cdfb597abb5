"""Let the ranks that save together exchange values, and fail together when one of them fails.

`NodeRanks` is for machines that share no file system: each machine keeps whole checkpoints in its own folder. The
processes of one machine save together, as in a run on one machine. All machines fail together, and resume
from a step that all of them have.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from tr_ckpt import manifest
from tr_ckpt.discovery import Found
from tr_ckpt.errors import CheckpointError, SaveError, UnreadableError
from tr_log import slow_work

logger = logging.getLogger(__name__)

T = TypeVar("T")

_MODEL = ("model.safetensors", "adapter_model.safetensors")


@dataclass(frozen=True)
class Failure:
    """Why a rank failed, in a form that can be sent to the others.

    Attributes:
        text: the error, with its kind.
        unread: the error's own text, where a file could not be read; otherwise None.
    """

    text: str
    unread: str | None = None

    @classmethod
    def of(cls, error: Exception) -> Failure:
        """Return that of an error."""
        try:
            return cls(f"{type(error).__name__}: {error}", str(error) if isinstance(error, UnreadableError) else None)
        except Exception:  # the user's own class: report the failure to the other ranks also without its text
            return cls(f"{type(error).__name__}, whose text cannot be shown")


@dataclass(frozen=True)
class Ranks:
    """This process among those that save together.

    Attributes:
        rank: its number, from 0.
        world_size: how many there are.
        gather_objects: takes a picklable value, returns those of all ranks in rank order; also acts as a
            barrier.
        lost_ranks: returns the ranks that the job has lost, and how that is known.
    """

    rank: int = 0
    world_size: int = 1
    gather_objects: Callable[[Any], list[Any]] | None = None
    lost_ranks: Callable[[], Mapping[int, str]] | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank {self.rank} of {self.world_size} processes does not exist; ranks count from 0")
        if self.world_size > 1 and self.gather_objects is None:
            raise ValueError(
                f"{self.world_size} processes save together, but gather_objects is None; give a function "
                "that takes a value and returns the list of all ranks' values, as all_gather_object can"
            )

    @property
    def number(self) -> int:
        """Number of this process among all of the run; its own files are named by it."""
        return self.rank

    @property
    def total(self) -> int:
        """How many processes the run has."""
        return self.world_size

    @property
    def is_one_of_several(self) -> bool:
        """Whether other groups of ranks save the same run elsewhere; see `NodeRanks`."""
        return False

    def lost(self) -> Mapping[int, str]:
        """Return those of these ranks that the job has lost, and how that is known, as far as it is."""
        return {} if self.lost_ranks is None else self.lost_ranks()

    def across(self, value: T) -> list[T]:
        """Return the value of each such group; only this group's value if there are no others."""
        return [value]

    def together(self, what: str, work: Callable[[], T], failure: type[Exception] = SaveError) -> list[T]:
        """Run `work` on every rank and return all results, in rank order. Collective over all processes of the run.

        Raises:
            Exception: what `work` raised on this rank.
            failure: `work` raised on another process of the run; the message names it, and begins with `what`.
            UnreadableError: if `failure` is `CheckpointError` and the failed ranks could not read a file. All ranks
                then raise it with the same text.
        """
        result, error = _attempted(work)
        return self._answered(what, self._everywhere((result, _told(error))), error, failure)

    def apart(
        self,
        what: str,
        work: Callable[[], T],
        failure: type[Exception] = SaveError,
        give_up: Callable[[], None] | None = None,
    ) -> list[T]:
        """Do the same for work that may take long, as it reads or writes, and that exchanges nothing. Collective.

        It runs in a thread, and no exchange lasts as long as it does: see `slow_work.apart`, also for `give_up`.
        """
        if self.gather_objects is None:
            return self.together(what, work, failure)
        error: Exception | None = None
        groups: list[int] = []

        def outcome() -> tuple[T | None, Failure | None]:
            nonlocal error
            result, error = _attempted(work)
            return result, _told(error)

        def exchange(value: Any) -> list[Any]:
            answers = self._everywhere(value)
            groups[:] = [group for group, _ in answers]
            return [answer for _, answer in answers]

        outcomes = slow_work.apart(exchange, outcome, give_up)
        return self._answered(what, list(zip(groups, outcomes, strict=True)), error, failure)

    def _answered(self, what: str, answers: Any, error: Exception | None, failure: type[Exception]) -> list[Any]:
        """Return the results of this group; raise if a process of the run has failed."""
        failed = {rank: failed for rank, (_, (_, failed)) in enumerate(answers) if failed is not None}
        texts = {rank: each.text for rank, each in failed.items()}
        unread = {rank: each.unread for rank, each in failed.items() if each.unread is not None}
        if failure is CheckpointError and self.total > 1 and len(unread) == len(failed):
            texts, error, failure = unread, None, UnreadableError
        if error is not None:
            raise error
        if texts:
            raise failure(f"{what}: {'; '.join(f'rank {rank}: {text}' for rank, text in texts.items())}")
        return [answer for group, (answer, _) in answers if group == self._group]

    @property
    def _group(self) -> int:
        return 0

    def _everywhere(self, value: T) -> list[tuple[int, T]]:
        """Return the value of every process of the run, each with its group's number."""
        return [(0, answer) for answer in ([value] if self.gather_objects is None else self.gather_objects(value))]


def _attempted(work: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """Return what `work` returned, and what it raised."""
    try:
        return work(), None
    except Exception as error:
        return None, error


def _told(error: Exception | None) -> Failure | None:
    return None if error is None else Failure.of(error)


@dataclass(frozen=True)
class NodeRanks(Ranks):
    """This process among those of its machine, which save together.

    `rank` and `world_size` refer to the machine. Every exchange involves all processes of the run, so that machines
    stay in step: an error on one is an error on all.

    Attributes:
        first: number of the machine's first process among all.
        all_processes: how many processes the run has.
    """

    first: int = 0
    all_processes: int = 1

    @classmethod
    def find(cls, rank: int, local_rank: int, world_size: int, gather_objects: Callable[[Any], list[Any]]) -> Ranks:
        """Return the ranks of this machine. Collective over all processes.

        Raises:
            ValueError: the processes of a machine are not numbered consecutively.
        """
        places = gather_objects((rank - local_rank, local_rank))
        mine = sorted(local for first, local in places if first == rank - local_rank)
        if mine != list(range(len(mine))):
            raise ValueError(
                f"rank {rank} has local_rank {local_rank}, and its machine has the local ranks {mine}; the ranks of a "
                "machine must follow one another, local ranks from 0, to save on each node"
            )
        if len(mine) == world_size:
            return Ranks(rank, world_size, gather_objects)
        # Those of one machine need no job to know which of them have ended.
        return cls(local_rank, len(mine), gather_objects, first=rank - local_rank, all_processes=world_size)

    @property
    def number(self) -> int:
        """Number of this process among all of the run."""
        return self.first + self.rank

    @property
    def total(self) -> int:
        """How many processes the run has."""
        return self.all_processes

    @property
    def is_one_of_several(self) -> bool:
        """Whether other machines save too."""
        return True

    def across(self, value: T) -> list[T]:
        """Return the value of the first rank of every machine. Collective over all processes."""
        answers = dict(reversed(self._everywhere(value)))  # a machine's first rank is written last, and wins
        return [answers[first] for first in sorted(answers)]

    @property
    def _group(self) -> int:
        return self.first

    def _everywhere(self, value: T) -> list[tuple[int, T]]:
        assert self.gather_objects is not None  # there are several processes
        return self.gather_objects((self.first, value))


def found_on_all(ranks: Ranks, candidates: list[Found]) -> tuple[list[Found], list[str]]:
    """Return the checkpoints that every machine has, in one order on all, and why others of this machine are skipped.

    Args:
        ranks: this process among the others; all must call this.
        candidates: the checkpoints of this machine.

    Raises:
        UnreadableError: a machine cannot read one of its own.
    """
    if not ranks.is_one_of_several:
        return candidates, []
    mine = {found.step: found for found in candidates}
    machines = ranks.across(
        ranks.apart(
            "nothing was restored",
            lambda: [(found.step, _identity(found)) for found in candidates],
            failure=CheckpointError,
        )[0]
    )
    held = [dict(machine) for machine in machines]
    kept = []
    for step, _ in machines[0]:
        seen = {machine[step] for machine in held if machine.get(step)}
        if all(step in machine for machine in held) and len(seen) <= 1:
            kept.append(mine[step])
    skipped = []
    for step, found in mine.items():
        if found not in kept:
            reason = "of another run there" if all(step in machine for machine in held) else "not on every machine"
            skipped.append(f"{found.name}: it is {reason}")
            if ranks.rank == 0:
                logger.warning("skipped %s", skipped[-1])
    return kept, skipped


def check_same_kind(ranks: Ranks, source: Path, seen: tuple[bool, bool, bool]) -> None:
    """Raise unless a named folder is the same kind of thing on every machine. Collective.

    Args:
        ranks: this process among the others.
        source: the folder.
        seen: whether it is a folder, a checkpoint, and has checkpoints in it, on this machine.

    Raises:
        CheckpointError: it differs.
    """
    kinds = {True: "a checkpoint", False: "a folder of checkpoints"}
    found = ranks.across("nothing to restore" if not any(seen[1:]) else kinds[seen[1]])
    if len(set(found)) > 1:
        listed = ", ".join(f"{kind} on machine {number}" for number, kind in enumerate(found))
        raise CheckpointError(f"{source} is not the same on every machine: {listed}")


def check_same_checkpoint(ranks: Ranks, found: Found) -> None:
    """Raise unless a named checkpoint is the same on every machine. Collective.

    Raises:
        CheckpointError: machines have checkpoints of different runs or steps.
        UnreadableError: a checkpoint cannot be read.
    """
    if not ranks.is_one_of_several:
        return
    seen = ranks.apart(f"{found.path} was not restored", lambda: _identity(found), failure=CheckpointError)[0]
    if len(set(ranks.across(seen)) - {None}) > 1:
        raise CheckpointError(f"{found.path} is not the same on every machine; name the checkpoint of one step and run")


def _identity(found: Found) -> str | None:
    """Return the content that all machines' copies of a checkpoint share; None if this one is damaged."""
    try:
        described = manifest.read(found.path)
    except UnreadableError:
        raise
    except CheckpointError:
        return None
    digests = [described.files[name].sha256 for name in _MODEL if name in described.files]
    return f"{described.step} {' '.join(digests)}"
