"""Attack what reads checkpoints: hostile ones at every door, changed bytes in every parser, drawn names and states."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import fuzz_batches
import hostile_corpus
import hypothesis_states
import torch
from children import in_child
from fuzz_parsers import parsers
from runner import EXECUTED, HUNG, OUTSIDE, WRONG_END, Case, Options, Tally

from tr_ckpt import CheckpointError

FUZZED = 100_000  # files a parser
DRAWN = 20_000
QUICK = 1_000
LIMIT_S = 60  # of one hostile checkpoint at one door


Doors = Callable[[Path], dict[str, Callable[[], object]]]


def cases(options: Options) -> Iterator[Case]:
    """Yield the doors of our checkpoints and of others', files for each parser, and names and states."""
    torch.set_num_threads(1)
    made = options.folder / "made"
    with fuzz_batches.silence():
        own, theirs = hostile_corpus.make_own(made / "own" / "run"), hostile_corpus.make_theirs(made / "theirs" / "run")
        every = 8 if options.quick else 1
        hostile = list(hostile_corpus.own(made))[::every], list(hostile_corpus.theirs())[::every]
        yield from _corpus("hostile checkpoints", own, hostile[0], hostile_corpus.doors_of_own)
        yield from _corpus("hostile foreign ones", theirs, hostile[1], hostile_corpus.doors_of_theirs)
        (made / "parsers").mkdir()
        for parser in parsers(made / "parsers"):
            yield from fuzz_batches.cases(parser, QUICK if options.quick else FUZZED, options.seed, made)
    number = 200 if options.quick else DRAWN
    yield Case("names", lambda folder: hypothesis_states.names(number, options.seed), "names")
    yield Case("states", lambda folder: hypothesis_states.states(number // 4, options.seed), "states")


def _corpus(row: str, source: Path, hostile: list[tuple[str, Callable[[Path], None]]], doors: Doors) -> Iterator[Case]:
    whole = source.parent.parent / "whole"
    for door in doors(hostile_corpus.copied(source, whole / "run")).values():
        door()  # or what is refused below would show nothing; and all is imported once
    shutil.rmtree(whole)
    for kind, spoil in hostile:
        for door in doors(source):
            yield Case(f"{kind} at {door}", partial(_go_through, source, kind, spoil, doors, door), row)


def _go_through(
    source: Path, kind: str, spoil: Callable[[Path], None], doors: Doors, door: str, folder: Path
) -> Tally:  # fmt: skip
    place = hostile_corpus.copied(source, folder / "corpus" / "this" / "run")
    spoil(place)
    before, tally = _outside(folder, place), Tally(1)
    ending, problem = _apart(doors(place)[door])
    if problem is not None:
        tally.wrong(problem, ending)
    elif _outside(folder, place) != before:
        tally.wrong(OUTSIDE, "something was made beside what was given")
    elif ending == "read" and door in hostile_corpus.STRICT and kind not in hostile_corpus.HARMLESS:
        tally.wrong(WRONG_END, "it was not refused")
    elif any(folder.rglob("executed")):
        tally.wrong(EXECUTED, "it was run")
    tally.ends[ending if problem is None else "problem"] += 1
    return tally


def _outside(folder: Path, place: Path) -> set[str]:
    allowed = place.parent.parent
    return {str(path) for path in folder.iterdir()} | {str(path) for path in allowed.parent.iterdir()}


def _apart(door: Callable[[], object]) -> tuple[str, str | None]:
    """Go through a door in a process of its own; returns how that ended, and the kind of problem that it is."""

    def work() -> str:
        fuzz_batches.limit_memory()
        with fuzz_batches.silence():
            return _through(door)

    end = in_child(work, LIMIT_S)
    if end.answer is None:
        return f"{end}"[-400:].replace("\n", " | "), HUNG if end.hung else WRONG_END
    kind, _, ending = end.answer.partition(" ")
    return (ending, kind) if kind in (EXECUTED, OUTSIDE, HUNG) else (end.answer, None)


def _through(door: Callable[[], object]) -> str:
    try:
        return "refused" if isinstance(code := door(), int) and code else "read"
    except CheckpointError as error:
        if fuzz_batches.is_of_memory(error):
            return f"{HUNG} it takes memory as it is told to: {error!s:.200}"
        if not all(line.replace("\t", "").isprintable() for line in str(error).split("\n")):
            raise AssertionError(f"its error can move a cursor: {error!r:.200}") from None
        return "refused"
