"""Run a campaign of planted faults: share out its cases, count what came of them, and say how to repeat what failed.

A campaign states groups of cases, each a fault and the judgement of what came of it; `main` is its command line. Cases
are shared among forks of this process, each in a folder of its own. It prints a line for each row of the table, what
went wrong below it, and last the counts of all; it exits with 1 if anything went wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import selectors
import shlex
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# What may go wrong.
LOST = "lost"  # a verified checkpoint or finished work is gone
EXECUTED = "executed"  # content that came from outside was run
OUTSIDE = "outside"  # something was written, removed or shown outside the folder that was given
HUNG = "hung"  # a time limit was passed, or memory grew beyond its limit
WRONG_END = "wrong end"  # an end, an exit code, a result or an error that is not the right one

# Of each row so many problems are printed, so much of each; with --keep all are in a file.
SHOWN, SHOWN_CHARACTERS = 10, 1500
PROGRESS_S = 20.0  # between two lines that say how far it has come

Problem = tuple[str, str]

# What is to be called when this process has done its cases.
at_end: list[Callable[[], object]] = []


@dataclass
class Tally:
    """What came of cases.

    Attributes:
        tried: how many there were.
        ends: how often they ended in which way that is right, and what else was seen, by words for each.
        problems: what went wrong: its kind, and a sentence.
        seconds: that they took.
    """

    tried: int = 0
    ends: Counter[str] = field(default_factory=Counter)
    problems: list[Problem] = field(default_factory=list)
    seconds: float = 0.0

    @classmethod
    def of(cls, problem: str, tried: int = 1, kind: str = WRONG_END) -> Tally:
        """Return that of a case of which nothing or one thing is wrong."""
        return cls(tried, problems=[(kind, problem)] if problem else [])

    def wrong(self, kind: str, text: str) -> None:
        """Note what went wrong."""
        self.problems.append((kind, text))

    def add(self, other: Tally) -> None:
        """Count what came of others, too."""
        self.tried += other.tried
        self.ends.update(other.ends)
        self.problems += other.problems
        self.seconds += other.seconds


@dataclass(frozen=True)
class Case:
    """Something to break, and to judge what came of it.

    Attributes:
        label: what it is, in words.
        work: does it, given an empty folder of its own; returns what is wrong, empty if nothing is, or a tally.
        row: of the table, if that is not its group's.
    """

    label: str
    work: Callable[[Path], str | Tally]
    row: str = ""


@dataclass(frozen=True)
class Group:
    """Cases that are made together.

    Attributes:
        what: they are, in words.
        cases: gives them, of what the campaign's `prepare` has returned.
        stride: of a quick session, one case in so many.
        is_default: whether they are made if no group is named.
    """

    what: str
    cases: Callable[[Any], Iterable[Case]]
    stride: int = 1
    is_default: bool = True


class Options(argparse.Namespace):
    """What the command line says, and `folder`, in which everything happens."""

    folder: Path
    only: list[str] | None
    case: str | None
    quick: bool
    seed: int
    jobs: int
    minutes: float | None
    keep: bool


@dataclass(frozen=True)
class Campaign:
    """What is run by one command line.

    Attributes:
        session: of nox, that runs it.
        about: what it does.
        groups: by name.
        nouns: what the last line calls cases, and what went wrong.
        kinds: of what may go wrong, a column each.
        prepare: called first; what it returns is what groups make their cases of.
        add_options: adds the campaign's own options.
        jobs: processes that share the cases by default.
    """

    session: str
    about: str
    groups: dict[str, Group]
    nouns: tuple[str, str] = ("faults", "mismatches")
    kinds: tuple[str, ...] = (WRONG_END,)
    prepare: Callable[[Options], Any] = lambda options: options
    add_options: Callable[[argparse.ArgumentParser], object] = lambda parser: None
    jobs: int = min(os.cpu_count() or 1, 8)


def main(campaign: Campaign, arguments: Sequence[str] | None = None) -> int:
    """Run a campaign as the command line says, and return the exit code."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    options = _read_options(campaign, given)
    # Under nohup, or behind a shell's `&`, these would be ignored here and in all that is started.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, _stop)
    memory = Path("/dev/shm")  # nothing here can see whether a sync is slow
    place = memory if os.access(memory, os.W_OK) else None
    root = Path(os.path.realpath(tempfile.mkdtemp(prefix=f"{campaign.session}-", dir=place)))
    options.folder = root / "session"
    options.folder.mkdir()
    try:
        return _run(campaign, options, f"nox -s {campaign.session} -- {shlex.join(given)}")
    finally:
        close()
        if options.keep:
            print(f"kept: {root}")
        else:
            shutil.rmtree(root, ignore_errors=True)


def close() -> None:
    """Call what is to be called at the end."""
    while at_end:
        at_end.pop()()


def _stop(*_: object) -> None:
    """Leave by an exception, which removes what would else stay in memory."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(143)


def _read_options(campaign: Campaign, given: Sequence[str]) -> Options:
    parser = argparse.ArgumentParser(
        description=campaign.about.split("\n")[0],
        epilog="\n".join(f"{name:<12} {group.what}" for name, group in campaign.groups.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", action="append", choices=campaign.groups, help="one group; may be given again")
    parser.add_argument("--case", metavar="GROUP:NUMBER", help="one case alone, as a problem names it")
    parser.add_argument("--quick", action="store_true", help="a part of each group")
    parser.add_argument("--seed", type=int, default=1, help="of what is drawn (%(default)s)")
    parser.add_argument(
        "--jobs", "--workers", type=int, default=campaign.jobs, help="processes that share the cases (%(default)s)"
    )
    parser.add_argument("--minutes", type=float, help="begin no case after so many")
    parser.add_argument("--keep", action="store_true", help="leave the folders of what went wrong")
    campaign.add_options(parser)
    options = parser.parse_args(given, Options())
    if options.case is not None:
        name, _, number = options.case.partition(":")
        if name not in campaign.groups or not number.isdecimal():
            parser.error(f"--case {options.case!r}: is to be GROUP:NUMBER, of the groups {', '.join(campaign.groups)}")
        options.only = [name]
    return options


def _run(campaign: Campaign, options: Options, command: str) -> int:
    began_s, total = time.monotonic(), Tally()
    prepared = campaign.prepare(options)
    columns = "".join(f"  {kind:>10}" for kind in campaign.kinds)
    print(f"{'':<30}  {campaign.nouns[0]:>9}{columns}  {'seconds':>8}", flush=True)
    told = []
    for name in options.only or [name for name, group in campaign.groups.items() if group.is_default]:
        group = campaign.groups[name]
        cases = chosen(list(enumerate(group.cases(prepared), 1)), group, options)
        folder = options.folder / name.replace(" ", "-")
        folder.mkdir()
        rows: dict[str, Tally] = {case.row or name: Tally() for _, case in cases}
        for number, tally in shared_out(cases, folder, options, began_s):
            row = rows.setdefault(next((case.row for n, case in cases if n == number), "") or name, Tally())
            again = f"\n    again: {command} --case {name}:{number}" if number else ""
            tally.problems = [(kind, f"{text[:SHOWN_CHARACTERS]}{again}") for kind, text in tally.problems]
            row.add(tally)
        for row, tally in rows.items():
            _show(campaign, row, tally, group.what if row == name else "")
            total.add(tally)
            told += [f"{kind}: {text}" for kind, text in tally.problems]
    (options.folder / "problems.txt").write_text("\n\n".join(told), "utf-8", "backslashreplace")
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    part = "; a part of all" if options.quick else ""
    print(f"{time.monotonic() - began_s:.0f} s, {used.ru_utime + used.ru_stime:.0f} s of processors{part}")
    print(f"{campaign.nouns[0]} {total.tried}, {campaign.nouns[1]} {len(total.problems)}")
    return 1 if total.problems else 0


def _show(campaign: Campaign, row: str, tally: Tally, what: str) -> None:
    kinds = Counter(kind for kind, _ in tally.problems)
    columns = "".join(f"  {kinds[kind]:>10,}" for kind in campaign.kinds)
    print(f"{row:<30}  {tally.tried:>9,}{columns}  {tally.seconds:>8.1f}  {what}".rstrip())
    for end, count in tally.ends.most_common():
        print(f"    {count:,} {end}")
    for kind, text in tally.problems[:SHOWN]:
        print(f"  {kind.upper()} {text}")
    sys.stdout.flush()


def chosen(cases: list[tuple[int, Case]], group: Group, options: Options) -> list[tuple[int, Case]]:
    """Return of numbered cases all, those of a quick session, or the one that was asked for."""
    if options.case is not None:
        number = int(options.case.partition(":")[2])
        return [(each, case) for each, case in cases if each == number]
    return cases[:: group.stride if options.quick else 1]


def shared_out(
    cases: Sequence[tuple[int, Case]], folder: Path, options: Options, began_s: float
) -> Iterator[tuple[int, Tally]]:
    """Yield the number of each case and what came of it, in the order in which they end; 0 is none of them."""
    until_s = began_s + 60 * options.minutes if options.minutes else float("inf")
    with tempfile.TemporaryFile() as turns:  # each process reads its next case there, at the place that all share
        turns.write(b"".join(index.to_bytes(4, "big") for index in range(len(cases))))
        turns.flush()
        os.lseek(turns.fileno(), 0, os.SEEK_SET)
        workers = [_start(cases, folder, turns.fileno(), until_s) for _ in range(min(options.jobs, len(cases)))]
        try:
            yield from _collected(workers, len(cases), until_s)
        except BaseException:
            for child, _ in workers:  # each with what it has started
                with suppress(ProcessLookupError):
                    os.killpg(child, signal.SIGKILL)
            raise


def _start(cases: Sequence[tuple[int, Case]], folder: Path, turns: int, until_s: float) -> tuple[int, int]:
    receive, send = os.pipe()
    sys.stdout.flush()
    child = os.fork()
    if child:
        os.close(send)
        return child, receive
    at_end.clear()  # of the process that this is a fork of
    code = 1
    try:
        os.setpgid(0, 0)
        os.close(receive)
        with os.fdopen(send, "w") as lines:
            while time.monotonic() < until_s and (turn := os.read(turns, 4)):
                number, case = cases[int.from_bytes(turn, "big")]
                tally = _do(case, folder / str(number))
                lines.write(json.dumps([number, vars(tally)]) + "\n")
                lines.flush()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        close()
        sys.stdout.flush()
        os._exit(code)


def _do(case: Case, folder: Path) -> Tally:
    folder.mkdir()
    began_s = time.monotonic()
    try:
        came = case.work(folder)
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        came = f"{type(error).__name__}: {error} ({Path(where.filename).name}:{where.lineno})"
    tally = came if isinstance(came, Tally) else Tally.of(came)
    tally.seconds = time.monotonic() - began_s
    tally.problems = [(kind, f"{case.label}: {text}") for kind, text in tally.problems]
    if tally.problems:  # left to be looked at
        (folder / "problems.txt").write_text(f"{tally.problems}")
    else:
        shutil.rmtree(folder, ignore_errors=True)
    return tally


def _collected(workers: list[tuple[int, int]], many: int, until_s: float) -> Iterator[tuple[int, Tally]]:
    """Yield what processes say of the cases that they did, until all have ended."""
    said, done, wrong, began_s = {child: b"" for child, _ in workers}, 0, 0, time.monotonic()
    told_s = began_s
    with selectors.DefaultSelector() as pipes:
        for child, pipe in workers:
            pipes.register(pipe, selectors.EVENT_READ, child)
        while pipes.get_map():
            for key, _ in pipes.select():
                child, block = key.data, os.read(key.fd, 1 << 16)
                *lines, said[child] = (said[child] + block).split(b"\n")
                for line in lines:
                    number, found = json.loads(line)
                    tally = Tally(found["tried"], Counter(found["ends"]), list(map(tuple, found["problems"])))
                    tally.seconds, done, wrong = found["seconds"], done + 1, wrong + bool(found["problems"])
                    yield number, tally
                if not block:
                    pipes.unregister(key.fd)
                    os.close(key.fd)
                    if status := os.waitpid(child, 0)[1]:
                        yield 0, Tally.of(f"a process of the session ended with status {status}", 0)
            if time.monotonic() - told_s > PROGRESS_S:
                told_s = time.monotonic()
                print(f"  {done:,} of {many:,}, {wrong:,} went wrong, {told_s - began_s:.0f} s", file=sys.stderr)
    if done < many and time.monotonic() < until_s:
        yield 0, Tally.of(f"{many - done} of {many} cases were not done", 0)
