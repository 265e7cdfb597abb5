"""Run a parser over many changed files in processes with limits, and judge how each ended."""

from __future__ import annotations

import contextlib
import json
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
from pathlib import Path

from attack_counts import EXECUTED, HUNG, OUTSIDE, WRONG_END, Count
from fuzz_bytes import mutated

LIMIT_S = 20  # of one file, most of which take less than a millisecond
MEMORY_BYTES = 2**30  # that a process may take beyond what it has when it starts
GROWTH_BYTES = 400 * 2**20  # that all files of a batch together may make it grow by
BATCH = 4000
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


def fuzz(parser: Parser, number: int, seed: int, jobs: int, folder: Path) -> Count:
    """Have a parser read `number` changed files and return how that ended."""
    count = Count(parser.name)
    _warm(parser, folder)
    waiting = list(range(0, number, BATCH))[::-1]
    running: dict[int, tuple[int, int, Path, mmap.mmap]] = {}
    while waiting or running:
        while waiting and len(running) < jobs:
            start = waiting.pop()
            end = min(number, start - start % BATCH + BATCH)
            _start(parser, seed, start, end, folder, running)
        pid, status = os.wait()
        if pid not in running:
            continue
        start, end, result, place = running.pop(pid)
        reached = int.from_bytes(place[:8], "little")
        if os.waitstatus_to_exitcode(status) == 0:
            _add(count, json.loads(result.read_text("utf-8")), end - start)
        else:
            how = f"signal {-code}" if (code := os.waitstatus_to_exitcode(status)) < 0 else f"exit code {code}"
            kind = HUNG if code == -signal.SIGALRM else WRONG_END
            count.wrong(kind, f"{parser.name} number {reached} of seed {seed}: the process ended by {how}")
            count.tried += reached + 1 - start
            if reached + 1 < end and len(count.problems) < _SHOWN:
                waiting.append(reached + 1)
    return count


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


def _start(
    parser: Parser, seed: int, start: int, end: int, folder: Path, running: dict[int, tuple[int, int, Path, mmap.mmap]]
) -> None:
    place = mmap.mmap(-1, 8)
    result = folder / f"{start}.json"
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        running[pid] = start, end, result, place
        return
    code = 1
    try:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        own = tempfile.mkdtemp(dir=folder)
        os.chdir(own)
        result.write_text(json.dumps(_batch(parser, seed, start, end, place)), "utf-8")
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _batch(parser: Parser, seed: int, start: int, end: int, place: mmap.mmap) -> dict[str, object]:
    global _seen
    sys.addaudithook(_audit)
    limit_memory()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    ends: Counter[str] = Counter()
    problems: list[tuple[str, str]] = []
    for number in range(start, end):
        place[:8] = number.to_bytes(8, "little")
        signal.alarm(LIMIT_S)
        data = mutated(seed * 10**9 + number, parser.seeds, parser.tokens)
        ending, kind = _read(parser, data, number)
        ends[ending if kind is None else "problem"] += 1
        if kind is not None and len(problems) < _SHOWN:
            problems.append((kind, f"{parser.name} number {number} of seed {seed}: {ending}"))
    signal.alarm(0)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * (1 if sys.platform == "darwin" else 1024)
    if grown > GROWTH_BYTES:
        problems.append((HUNG, f"{parser.name} {start} to {end} of seed {seed}: memory grew by {grown:,} bytes"))
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


def _add(count: Count, result: dict, tried: int) -> None:
    count.tried += tried
    count.ends.update(result["ends"])
    for kind, text in result["problems"]:
        count.wrong(kind, text)


@contextlib.contextmanager
def fast_folder(fallback: Path) -> Iterator[Path]:
    """Give a folder in memory where there is one."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else fallback) as folder:
        yield Path(folder)
