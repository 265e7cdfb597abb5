"""Kill a run of several ranks, all of them together, as a launcher does when one has died."""

from __future__ import annotations

import json
import os
import signal
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from crash_kills import judge_what_is_left
from crash_process import Outcome, die, in_child
from crash_session import Alone, Fault, Session, newest
from crash_training import NEW_BASIS, SAVED, build, digest, digest_end, watch

WORLD_SIZE = 2


def in_ranks(work: Callable[[int], Any]) -> Outcome:
    """Call `work(rank)` in ranks of a job, each a fork of this process; the answer is the list of theirs.

    As soon as one dies, all are killed.
    """
    return in_child(lambda: _lead(work))


def _lead(work: Callable[[int], Any]) -> list[Any]:
    with tempfile.TemporaryDirectory(prefix="crash-ranks-") as place:
        ranks = {_start(partial(work, rank), rank, Path(place)): rank for rank in range(WORLD_SIZE)}
        living, failed = set(ranks), 0
        while living:
            child, status = os.wait()
            living.discard(child)
            if status and not failed:
                failed = status
                for other in living:
                    os.kill(other, signal.SIGKILL)
        answers = [Path(place, str(rank)) for rank in range(WORLD_SIZE)]
        said = [path.read_text() if path.exists() else "" for path in answers]
        if failed:
            raise RuntimeError("; ".join(text for text in said if text) or f"a rank ended with status {failed}")
        return [json.loads(text) for text in said]


def _start(work: Callable[[], Any], rank: int, place: Path) -> int:
    child = os.fork()
    if child:
        return child
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(WORLD_SIZE),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(WORLD_SIZE),
        GROUP_RANK="0",
        TR_RENDEZVOUS_FILE=str(place / "meet"),
    )
    code = 1
    try:
        Path(place, str(rank)).write_text(json.dumps(work()))
        code = 0
    except BaseException as error:
        Path(place, str(rank)).write_text(f"rank {rank}: {type(error).__name__}: {error}")
    finally:
        os._exit(code)


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

    outcome = in_ranks(work)
    if outcome.answer is None:
        raise RuntimeError(f"the ranks left alone did not end: {outcome}")
    first = outcome.answer[0]
    folders = sorted(path.name for path in folder.iterdir() if path.is_dir())
    places = [[(place, step) for place, step in answer["places"]] for answer in outcome.answer]
    wrong = "" if len({answer["shared"] for answer in outcome.answer}) == 1 else "the ranks end with different bits"
    return Alone(first["end"], [], [], [], places[0], dict(first["states"]), folders), places, wrong


def kills_of_ranks(session: Session, every: int) -> Iterator[Fault]:
    """Yield kills of one rank at every place in every step, after which the other is killed too, and a new start.

    Args:
        session: an empty one; its undisturbed run is made here.
        every: one rank dies at one of so many of its places; the other at others.
    """
    alone, places, wrong = ranks_alone(session.root / "alone", **session.options)
    session.alone = {False: alone}
    if wrong:
        yield Fault("ranks left alone", lambda folder: wrong)
    for rank, reached in enumerate(places):
        counted: Counter[str] = Counter()
        for number, (place, saved) in enumerate(reached):
            counted[place] += 1
            if number % every == rank % every or place == NEW_BASIS:
                work = partial(_killed_and_gone_on, session, rank, place, counted[place], saved)
                yield Fault(f"rank {rank} killed {place}, the {counted[place]}. time", work)


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

    first = in_ranks(work)
    if not struck.exists() or first.answer is not None:
        return f"the fault did not strike: the run {first}"
    problem = judge_what_is_left(session, run, saved)
    if problem:
        return problem
    again = in_ranks(lambda this: train_rank(run, **session.options))
    if again.answer is None:
        return f"the next start did not end: {again}"
    ends, shared = zip(*again.answer, strict=True)
    if ends[0] != session.end:
        return f"it ends with {ends[0][:16]}, not with {session.end[:16]}"
    return "" if len(set(shared)) == 1 else "the ranks end with different bits"
