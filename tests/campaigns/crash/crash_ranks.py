"""Kill a run of several ranks, all of them together, as a launcher does when one has died."""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from children import die, in_ranks, place_of
from crash_kills import judge_what_is_left
from crash_session import Alone, Session, newest
from crash_training import NEW_BASIS, SAVED, build, digest, digest_end, watch
from runner import Case

WORLD_SIZE = 2


def as_ranks(work: Callable[[int], Any]) -> list[Any]:
    """Call `work(rank)` in ranks of a job, each a fork of this process; as soon as one dies, all are killed.

    Returns:
        What each returns.

    Raises:
        RuntimeError: one did not end well.
    """
    with tempfile.TemporaryDirectory(prefix="crash-ranks-") as place:

        def rank_of(rank: int, gather: object) -> Any:
            os.environ.update(place_of(rank, WORLD_SIZE, Path(place, "meet")))
            return work(rank)

        ends = in_ranks(rank_of, WORLD_SIZE, grace_s=0.0)
    if any(end.answer is None for end in ends):
        raise RuntimeError("; ".join(f"rank {rank} {end}" for rank, end in enumerate(ends)))
    return [end.answer for end in ends]


def train_rank(folder: Path, **options: Any) -> tuple[str, str]:
    """Train to the end, from the newest checkpoint if there is one.

    Returns:
        A digest of the end, and one of what all ranks share to the last bit: weights and the optimizer's state.
    """
    trainer = build(folder, **options)
    trainer.train(resume_from_checkpoint="auto")
    assert trainer.optimizer is not None
    shared = digest([dict(trainer.model.state_dict()), trainer.optimizer.state_dict()])
    end = digest_end(trainer)
    trainer.strategy.close()
    return end, shared


def ranks_alone(folder: Path, **options: Any) -> tuple[Alone, list[list[tuple[str, int]]], str]:
    """Let ranks train undisturbed.

    Returns:
        What the first rank's run is to end with; each rank's places, with the step of the last save; what is wrong.
    """

    def work(rank: int) -> dict[str, Any]:
        places: list[tuple[str, int]] = []
        states: list[tuple[int, str]] = []

        def watcher(place: str, step: int) -> None:
            places.append((place, states[-1][0] if states else 0))
            if place == SAVED:
                states.append((step, newest(folder)[1] if rank == 0 else ""))

        watch(watcher)
        end, shared = train_rank(folder, **options)
        return {"end": end, "shared": shared, "places": places, "states": states}

    answers = as_ranks(work)
    first = answers[0]
    folders = sorted(path.name for path in folder.iterdir() if path.is_dir())
    places = [[(place, step) for place, step in answer["places"]] for answer in answers]
    wrong = "" if len({answer["shared"] for answer in answers}) == 1 else "the ranks end with different bits"
    return Alone(first["end"], [], [], [], places[0], dict(first["states"]), folders), places, wrong


def kills_of_ranks(session: Session, every: int) -> Iterator[Case]:
    """Yield kills of one rank at every place in every step, after which the other is killed too, and a new start.

    Args:
        session: an empty one; its undisturbed run is made here.
        every: one rank dies at one of so many of its places; the other at others.
    """
    alone, places, wrong = ranks_alone(session.root / "alone", **session.options)
    session.alone = {False: alone}
    if wrong:
        yield Case("ranks left alone", lambda folder: wrong)
    for rank, reached in enumerate(places):
        counted: Counter[str] = Counter()
        for number, (place, saved) in enumerate(reached):
            counted[place] += 1
            if number % every == rank % every or place == NEW_BASIS:
                work = partial(_killed_and_gone_on, session, rank, place, counted[place], saved)
                yield Case(f"rank {rank} killed {place}, the {counted[place]}. time", work)


def _killed_and_gone_on(session: Session, rank: int, place: str, times: int, saved: int, folder: Path) -> str:
    run, struck = folder / "run", folder / "struck"

    def work(this: int) -> Any:
        reached: Counter[str] = Counter()

        def watcher(now: str, step: int) -> None:
            reached[now] += 1
            if this == rank and (now, reached[now]) == (place, times):
                struck.touch()
                die()

        watch(watcher)
        return train_rank(run, **session.options)

    first: Any = None
    with suppress(RuntimeError):
        first = as_ranks(work)
    if not struck.exists() or first is not None:
        return f"the fault did not strike: the run ended with {first}"
    if problem := judge_what_is_left(session, run, saved):
        return problem
    ends, shared = zip(*as_ranks(lambda this: train_rank(run, **session.options)), strict=True)
    if ends[0] != session.end:
        return f"it ends with {ends[0][:16]}, not with {session.end[:16]}"
    return "" if len(set(shared)) == 1 else "the ranks end with different bits"
