"""Let all ranks know when one of them fails."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from tr_ckpt.errors import CheckpointError, SaveError, UnreadableError

T = TypeVar("T")

_UNREADABLE = f"{UnreadableError.__name__}: "


@dataclass(frozen=True)
class Ranks:
    """This process among those that save together.

    Attributes:
        rank: its number, from 0.
        world_size: how many there are.
        gather_objects: takes a picklable value, returns those of all ranks in rank order; it also is a
            barrier.
    """

    rank: int = 0
    world_size: int = 1
    gather_objects: Callable[[Any], list[Any]] | None = None

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
        """Number of this process among all of the run, by which its own files are named."""
        return self.rank

    @property
    def total(self) -> int:
        """How many processes the run has."""
        return self.world_size

    @property
    def is_one_of_several(self) -> bool:
        """Whether other groups of ranks save the same run elsewhere; see `nodes.py`."""
        return False

    def across(self, value: T) -> list[T]:
        """Return the value of each such group; that of this one where there are no others."""
        return [value]

    def gather(self, value: T) -> list[T]:
        """Return every rank's `value`, in rank order; all processes of the run must call it."""
        return [answer for group, answer in self._everywhere(value) if group == self._group]

    def together(self, what: str, work: Callable[[], T], failure: type[Exception] = SaveError) -> list[T]:
        """Do `work` on every rank and return all results, in rank order; all processes of the run must call it.

        Raises:
            Exception: what `work` raised on this rank.
            failure: it raised on another process of the run; the message says which, and begins with `what`.
            UnreadableError: where `failure` is `CheckpointError`, in place of it and on all, with one text: the ranks
                that failed could not read something.
        """
        error: Exception | None = None
        result: Any = None
        try:
            result = work()
        except Exception as caught:
            error = caught
        answers = self._everywhere((result, None if error is None else _text(error)))
        failed = [(rank, text) for rank, (_, (_, text)) in enumerate(answers) if text is not None]
        if failure is CheckpointError and self.total > 1 and all(text.startswith(_UNREADABLE) for _, text in failed):
            failed = [(rank, text.removeprefix(_UNREADABLE)) for rank, text in failed]
            error, failure = None, UnreadableError
        if error is not None:
            raise error
        if failed:
            raise failure(f"{what}: {'; '.join(f'rank {rank}: {text}' for rank, text in failed)}")
        return [answer for group, (answer, _) in answers if group == self._group]

    @property
    def _group(self) -> int:
        return 0

    def _everywhere(self, value: T) -> list[tuple[int, T]]:
        """Return the value of every process of the run, each with its group."""
        return [(0, answer) for answer in ([value] if self.gather_objects is None else self.gather_objects(value))]


def _text(error: Exception) -> str:
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # of the user's own: without its text too, the other ranks are to hear of it
        return f"{type(error).__name__}, whose text cannot be shown"
