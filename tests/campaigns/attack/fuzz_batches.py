"""Run a parser over many changed files in processes with limits, and judge how each ended."""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import re
import resource
import signal
import sys
import sysconfig
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from children import in_child
from fuzz_bytes import mutated
from runner import EXECUTED, HUNG, OUTSIDE, WRONG_END, Case, Tally

LIMIT_S = 20  # of one file, most of which take less than a millisecond
MEMORY_BYTES = 2**30  # that a process may take beyond what it has when it starts
GROWTH_BYTES = 400 * 2**20  # that all files of a batch together may make it grow by
BATCH, BATCH_LIMIT_S = 4000, 3600.0
_SHOWN = 20

_OF_PYTHON = tuple({*sysconfig.get_paths().values(), sys.prefix, sys.base_prefix})
_RUNS = ("os.system", "os.posix_spawn", "os.exec", "os.fork", "subprocess.Popen", "pickle.find_class", "socket.connect")
_WRITES = ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.truncate", "os.chmod")

_seen: list[tuple[str, str]] | None = None


def _audit(event: str, arguments: tuple[object, ...]) -> None:
    if _seen is None:
        return
    if event in _RUNS or (event == "exec" and _is_foreign(arguments[0])):
        _seen.append((EXECUTED, f"{event} {arguments!r:.200}"))
    elif event in _WRITES or (event == "open" and set(str(arguments[1] or "")) & set("wax+")):
        _seen.append((OUTSIDE, f"{event} {arguments!r:.200}"))


def _is_foreign(code: object) -> bool:
    """Whether it is not Python's own: named tuples, and what a library imports when it is first needed."""
    origin = getattr(code, "co_filename", "")
    return not origin.startswith((*_OF_PYTHON, "<frozen", "<string>", str(Path(__file__).parents[3] / "packages")))


@dataclass(frozen=True)
class Parser:
    """Something that reads what may be anybody's.

    Attributes:
        name: in the table.
        seeds: files that it reads, to be changed.
        tokens: what means something in them.
        parse: reads one; it may write only below the folder that it is given before it is watched.
        prepare: turns changed bytes into what `parse` takes, unwatched: puts a digest right, writes a file.
        errors: what it may raise.
    """

    name: str
    seeds: tuple[bytes, ...]
    tokens: tuple[bytes, ...]
    parse: Callable[[object], object]
    prepare: Callable[[bytes, int], object]
    errors: tuple[type[Exception], ...]


def cases(parser: Parser, number: int, seed: int, folder: Path) -> Iterator[Case]:
    """Yield batches of `number` changed files for a parser to read."""
    _warm(parser, folder)
    for start in range(0, number, BATCH):
        numbers = range(start, min(number, start + BATCH))
        label = f"{parser.name}, seed {seed}, {numbers.start} to {numbers.stop}"
        yield Case(label, partial(_batches, parser, seed, numbers), parser.name)


def _batches(parser: Parser, seed: int, numbers: range, folder: Path) -> Tally:
    """Have a parser read files, in another process after each file by which one ended."""
    tally, place = Tally(), mmap.mmap(-1, 8)
    while numbers and len(tally.problems) < _SHOWN:
        end = in_child(partial(_batch, parser, seed, numbers, place, folder), BATCH_LIMIT_S)
        if end.answer is not None:
            problems = [(kind, text) for kind, text in end.answer["problems"]]
            tally.add(Tally(len(numbers), Counter(end.answer["ends"]), problems))
            break
        reached = int.from_bytes(place[:8], "little")
        kind = HUNG if end.hung or end.signal == signal.SIGALRM else WRONG_END
        tally.wrong(kind, f"number {reached}: the process {end}")
        tally.tried += reached + 1 - numbers.start
        numbers = range(reached + 1, numbers.stop)
    return tally


def _warm(parser: Parser, folder: Path) -> None:
    """Read the files as they are: what is imported and made when it is first needed then is there in all processes.

    Raises:
        RuntimeError: none of them is read, so that changed ones would be refused at the first look.
    """
    former = os.getcwd()
    os.chdir(tempfile.mkdtemp(dir=folder))
    num_read = 0
    try:
        for number, each in enumerate(parser.seeds):
            with contextlib.suppress(*parser.errors):
                parser.parse(parser.prepare(each, number))
                num_read += 1
    finally:
        os.chdir(former)
    if parser.seeds and not num_read:
        raise RuntimeError(f"{parser.name}: every file is refused before it is changed")


def _batch(parser: Parser, seed: int, numbers: range, place: mmap.mmap, folder: Path) -> dict[str, object]:
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    logging.disable(logging.CRITICAL)
    os.chdir(tempfile.mkdtemp(dir=folder))
    sys.addaudithook(_audit)
    limit_memory()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    ends: Counter[str] = Counter()
    problems: list[tuple[str, str]] = []
    for number in numbers:
        place[:8] = number.to_bytes(8, "little")
        signal.alarm(LIMIT_S)
        data = mutated(seed * 10**9 + number, parser.seeds, parser.tokens)
        ending, kind = _read(parser, data, number)
        ends[ending if kind is None else "problem"] += 1
        if kind is not None and len(problems) < _SHOWN:
            problems.append((kind, f"number {number}: {ending}"))
    signal.alarm(0)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * (1 if sys.platform == "darwin" else 1024)
    if grown > GROWTH_BYTES:
        problems.append((HUNG, f"memory grew by {grown:,} bytes"))
    return {"ends": ends, "problems": problems}


def _read(parser: Parser, data: bytes, number: int) -> tuple[str, str | None]:
    """Return how it ended, and the kind of problem that it is, if it is one."""
    global _seen
    prepared = parser.prepare(data, number)
    _seen = []
    try:
        parser.parse(prepared)
        ending, kind = "read", None
    except parser.errors as error:
        ending, kind = "refused", None
        if is_of_memory(error):
            ending, kind = f"it takes memory as it is told to: {error!s:.200}", HUNG
        elif not all(line.replace("\t", "").isprintable() for line in str(error).split("\n")):
            ending, kind = f"its error can move a cursor: {error!s:.200}", WRONG_END
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        ending, kind = f"{type(error).__name__}: {error!s:.200} ({Path(where.filename).name}:{where.lineno})", WRONG_END
    finally:
        seen, _seen = _seen, None
    if seen:
        ending, kind = seen[0][1], seen[0][0]
    return ending, kind


def limit_memory() -> None:
    """Let this process take `MEMORY_BYTES` more than it has, where the system can tell what that is."""
    if sys.platform == "linux":
        size = int(Path("/proc/self/statm").read_text("ascii").split()[0]) * mmap.PAGESIZE
        resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY_BYTES,) * 2)


def is_of_memory(error: BaseException | None) -> bool:
    """Whether memory was asked for that there was not."""
    while error is not None:
        if isinstance(error, MemoryError) or re.search(r"\bmemory\b|\balloc(ate|ation|ator)?", str(error)):
            return True
        error = error.__cause__ or error.__context__
    return False


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """Have nothing logged in the block."""
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)
