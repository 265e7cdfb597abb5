"""Attack what reads checkpoints: hostile ones at every door, changed bytes in every parser, drawn names and states."""

from __future__ import annotations

import logging
import os
import signal
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import fuzz_batches
import hostile_corpus
import hypothesis_states
import torch
from attack_counts import EXECUTED, HUNG, OUTSIDE, WRONG_END, Count, Options
from fuzz_parsers import parsers

from tr_ckpt import CheckpointError

FUZZED = 100_000  # files a parser
DRAWN = 20_000
QUICK = 1_000
LIMIT_S = 60  # of one hostile checkpoint at one door


def attack(options: Options) -> Iterator[Count]:
    """Yield a count for the doors of our checkpoints and of others', for each parser, and for names and states."""
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    with fuzz_batches.fast_folder(options.folder) as folder:
        made = hostile_corpus.make_own(folder / "own" / "run"), hostile_corpus.make_theirs(folder / "theirs" / "run")
        (folder / "said").write_text("")
        own = list(hostile_corpus.own(folder))
        theirs = list(hostile_corpus.theirs())
        every = 8 if options.quick else 1
        yield _corpus("hostile checkpoints", made[0], own[::every], hostile_corpus.doors_of_own, folder)
        yield _corpus("hostile foreign ones", made[1], theirs[::every], hostile_corpus.doors_of_theirs, folder)
        (folder / "parsers").mkdir()
        for parser in parsers(folder / "parsers"):
            work = folder / "fuzz"
            work.mkdir(exist_ok=True)
            yield fuzz_batches.fuzz(parser, QUICK if options.quick else FUZZED, options.seed, options.jobs, work)
    number = 200 if options.quick else DRAWN
    yield hypothesis_states.names(number, options.seed)
    yield hypothesis_states.states(number // 4, options.seed)


def _corpus(
    group: str,
    source: Path,
    hostile: list[tuple[str, Callable[[Path], None]]],
    doors: Callable[[Path], dict[str, Callable[[], object]]],
    folder: Path,
) -> Count:
    count = Count(group)
    for door in doors(hostile_corpus.copied(source, folder / "corpus" / "whole" / "run")).values():
        door()  # or what is refused below would show nothing; and all is imported once
    hostile_corpus.shutil.rmtree(folder / "corpus")
    for number, (kind, spoil) in enumerate(hostile):
        for door in doors(source):
            place = hostile_corpus.copied(source, folder / "corpus" / f"{number}-{door}" / "run")
            spoil(place)
            before = _outside(folder, place)
            count.tried += 1
            ending, problem = _apart(doors(place)[door], folder / "said")
            if problem is not None:
                count.wrong(problem, f"{kind} at {door}: {ending}")
            elif _outside(folder, place) != before:
                count.wrong(OUTSIDE, f"{kind} at {door}: something was made beside what was given")
            elif ending == "read" and door in hostile_corpus.STRICT and kind not in hostile_corpus.HARMLESS:
                count.wrong(WRONG_END, f"{kind} at {door}: it was not refused")
            elif any(folder.rglob("executed")):
                count.wrong(EXECUTED, f"{kind} at {door}")
            count.ends[ending if problem is None else "problem"] += 1
            hostile_corpus.shutil.rmtree(folder / "corpus")
    return count


def _outside(folder: Path, place: Path) -> set[str]:
    allowed = place.parent.parent
    return {str(path) for path in folder.iterdir()} | {str(path) for path in allowed.parent.iterdir()}


def _apart(door: Callable[[], object], said: Path) -> tuple[str, str | None]:
    """Go through a door in a process of its own; returns how that ended, and the kind of problem that it is."""
    pid = os.fork()
    if not pid:
        code = 1
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(LIMIT_S)
            fuzz_batches.limit_memory()
            said.write_text(_through(door), "utf-8", "backslashreplace")
            code = 0
        except BaseException:
            said.write_text(traceback.format_exc()[-400:], "utf-8", "backslashreplace")
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code == -signal.SIGALRM:
        return f"more than {LIMIT_S} s", HUNG
    text = said.read_text("utf-8") if code in (0, 1) else f"the process ended by {code}"
    kind, _, ending = text.partition(" ")
    if code == 0 and kind in (EXECUTED, OUTSIDE, HUNG):
        return ending, kind
    return (text, None) if code == 0 else (text.replace("\n", " | "), WRONG_END)


def _through(door: Callable[[], object]) -> str:
    try:
        return "refused" if isinstance(code := door(), int) and code else "read"
    except CheckpointError as error:
        if fuzz_batches.is_of_memory(error):
            return f"{HUNG} it takes memory as it is told to: {error!s:.200}"
        if not all(line.replace("\t", "").isprintable() for line in str(error).split("\n")):
            raise AssertionError(f"its error can move a cursor: {error!r:.200}") from None
        return "refused"
