"""Let an override write the model's files of a checkpoint on all ranks.

A checkpointer calls `write_extra` on one rank while the others wait for it, and an override may exchange between ranks.
So all ranks run the override first, in a folder beside the checkpoints, and the checkpointer then takes its files.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tr_core.protocols import Collectives

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
        _run_on_all(make, collectives)
        _run_on_all(lambda: write(folder), collectives)
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


def _run_on_all(work: Callable[[], None], collectives: Collectives) -> None:
    problem: Exception | None = None
    try:
        work()
    except Exception as error:
        problem = error
    answers = collectives.gather_objects(None if problem is None else f"{type(problem).__name__}: {problem}")
    if problem is not None:
        raise problem
    failed = {rank: text for rank, text in enumerate(answers) if text is not None}
    if failed:
        rank, text = next(iter(failed.items()))
        raise RuntimeError(f"the checkpoint is not saved: the model's files were not written on rank {rank}: {text}")
