"""Hold what a checkpoint of another program says, in the shape of the parts of ours."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from tr_ckpt import parts

Key = TypeVar("Key", str, int)


class States(Mapping[Key, Any], Generic[Key]):
    """States that are read when they are asked for, anew each time.

    Args:
        readers: what reads each.
    """

    def __init__(self, readers: Mapping[Key, Callable[[], Any]]) -> None:
        self._readers = dict(readers)

    def __getitem__(self, key: Key) -> Any:
        return self._readers[key]()

    def __iter__(self) -> Iterator[Key]:
        return iter(self._readers)

    def __len__(self) -> int:
        return len(self._readers)


@dataclass(frozen=True)
class ForeignCheckpoint:
    """A checkpoint of another program.

    Attributes:
        program: what wrote it, as messages name it.
        path: where it is.
        step: completed optimizer steps.
        world_size: number of processes that saved, as far as the files tell.
        states: the state of each part that ranks share, by the names that tr-core gives them: `model`, `optimizer`,
            `scheduler`, `run` and so on; read when asked for, which raises `CheckpointError` if its file is missing,
            damaged, or holds anything but plain state.
        random_states: the state of the part `rng`, of each rank.
        parts: what it holds, of these names.
        plain_files: names of files in it that belong beside a model: configuration, tokenizer.
        notes: what of it is not taken over, one sentence each.
    """

    program: str
    path: Path
    step: int
    world_size: int
    states: Mapping[str, Any]
    random_states: Mapping[int, Any]
    parts: tuple[str, ...]
    plain_files: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def has(self, part: str, rank: int) -> bool:
        """Whether it holds a part's state for a rank."""
        return rank in self.random_states if part in parts.PER_RANK else part in self.states

    def state(self, part: str, rank: int) -> Any:
        """Return a part's state for a rank.

        Raises:
            CheckpointError: its file is missing, damaged, or holds anything but plain state.
        """
        return self.random_states[rank] if part in parts.PER_RANK else self.states[part]
