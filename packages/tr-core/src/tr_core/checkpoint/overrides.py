"""Let overrides write the model's files of a checkpoint, on all ranks, and decide what a resume loads.

A checkpointer calls `write_extra` on one rank while the others wait for it, and an override may exchange between ranks.
So all ranks run the override first, in a folder beside the checkpoints, and the checkpointer then takes its files.
"""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_map

from tr_core.protocols import Collectives, Stateful
from tr_log import slow_work

FOLDER = ".written-by-override"  # one run at a time saves to an output folder, so it needs no number


@contextmanager
def written_files(
    folder: Path, write: Callable[[Path], None], collectives: Collectives, *, writes: bool
) -> Iterator[Callable[[Path], None]]:
    """Run an override on all ranks, and return a function that moves its files into another folder. Collective.

    `folder`'s parent is removed afterwards. An error on this rank is raised; on the others a RuntimeError says so.
    """

    def make() -> None:
        if writes:
            shutil.rmtree(folder.parent, ignore_errors=True)  # of a killed run
            folder.mkdir(parents=True)

    def move(into: Path) -> None:
        for path in sorted(folder.iterdir()):
            shutil.move(path, into / path.name)

    try:
        what = "the checkpoint is not saved: the model's files were not written"
        run_on_all(what, make, collectives)
        run_on_all(what, lambda: write(folder), collectives, exchanges=True)
        yield move
    finally:
        if writes:
            shutil.rmtree(folder.parent, ignore_errors=True)


@contextmanager
def set_aside(begun: Path | None, folder: Path) -> Iterator[None]:
    """Move what an override began of a checkpoint into a folder while it is saved, and back if that fails."""
    if begun is None or not begun.is_dir():
        yield
        return
    aside = begun.rename(folder.parent / "begun")
    try:
        yield
    except BaseException:
        aside.rename(begun)
        raise


def run_on_all(what: str, work: Callable[[], None], collectives: Collectives, *, exchanges: bool = False) -> None:
    """Run `work` on every rank; an error on this one is raised, and on the others a RuntimeError says so. Collective.

    Args:
        what: the beginning of that.
        work: what writes, and may take long: it runs in a thread while ranks hear of each other.
        collectives: this process among the ranks.
        exchanges: whether `work` may exchange values itself; it then runs in this thread.
    """
    problem: Exception | None = None

    def outcome() -> str | None:
        nonlocal problem
        try:
            work()
        except Exception as error:
            problem = error
            return f"{type(problem).__name__}: {problem}"
        return None

    def wait() -> None:
        """Let what is being written end before an exception goes on."""

    if exchanges or collectives.world_size == 1:
        answers = collectives.gather_objects(outcome())
    else:
        answers = slow_work.apart(collectives.gather_objects, outcome, wait)
    if problem is not None:
        raise problem
    failed = {rank: text for rank, text in enumerate(answers) if text is not None}
    if failed:
        rank, text = next(iter(failed.items()))
        raise RuntimeError(f"{what} on rank {rank}: {text}")


class OwnLoading:
    """Move parts between their states before a resume and those of the checkpoint.

    Args:
        parts: what it loads, before the resume.
        can_put_back: whether the strategy lets these parts be loaded by `load_state_dict`.
    """

    def __init__(self, method: str, parts: Mapping[str, Stateful], *, can_put_back: bool) -> None:
        self._method, self._parts, self._can_put_back = method, dict(parts), can_put_back
        self._before = _copied(self._parts) if can_put_back else {}
        self._restored: dict[str, Any] = {}
        self._is_loaded = False

    def put_back(self) -> None:
        """Keep the states that the resume restored, and load those of before it."""
        if self._can_put_back:
            self._restored = _copied(self._parts)
            self._load(self._before)

    def load(self) -> None:
        """Load the states of the checkpoint."""
        self._load(self._restored)
        self._is_loaded = True

    def check(self) -> None:
        """Raise if the override did not load the checkpoint's states, and they could not be put back before it."""
        if not self._can_put_back and not self._is_loaded:
            raise RuntimeError(
                f"the override of {self._method} did not call super(), but this strategy restores "
                f"{' and '.join(self._parts)} in any case; call super().{self._method}(...) in it and load more after "
                "that, or begin with the weights alone: load them into the model, and train without "
                "resume_from_checkpoint"
            )

    def _load(self, states: Mapping[str, Any]) -> None:
        for name, state in states.items():
            self._parts[name].load_state_dict(state)


def _copied(parts: Mapping[str, Stateful]) -> dict[str, Any]:
    return {name: tree_map(_copy, dict(part.state_dict())) for name, part in parts.items()}


def _copy(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return copy.deepcopy(leaf)
    is_shard = hasattr(leaf, "device_mesh")  # it is loaded from its own device only
    return leaf.detach().clone() if is_shard else leaf.detach().to("cpu", copy=True)
