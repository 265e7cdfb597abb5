"""Faults that end a process, or an operation, and what must hold afterwards."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from children import End, die, in_child
from crash_order import MANIFEST
from crash_session import NEW_RUN, Alone, Session, as_alone, newest, passed_over, run_alone
from crash_training import train, watch
from disk import Breaker, every_operation
from runner import Case, Tally

from tr_ckpt import Checkpointer

CLEARING_SHARE, RETENTION_SHARE = 2, 5
WAY = {False: "synchronous", True: "asynchronous"}


def training(folder: Path, breaker: Breaker, **options: Any) -> End:
    """Train in a process of its own whose operations `breaker` decides about."""

    def work() -> str:
        with every_operation(breaker):
            return train(folder, **options)

    return in_child(work)


def killed_at(folder: Path, place: str, times: int, **options: Any) -> End:
    """Train in a process that dies when it reaches `place` for the `times`-th time."""

    def work() -> str:
        reached: Counter[str] = Counter()

        def watcher(now: str, step: int) -> None:
            reached[now] += 1
            if (now, reached[now]) == (place, times):
                die()

        watch(watcher)
        return train(folder, **options)

    return in_child(work)


def judge_what_is_left(session: Session, run: Path, at_least: int) -> str:
    """Say what is wrong with what a dead process left: empty if no progress and no bit was lost."""
    for path in sorted(run.glob("checkpoint-*")):
        try:
            Checkpointer(run).restore({}, source=path)
        except ValueError as error:
            return f"{path.name} bears the name of a checkpoint and is none: {error}"
    step, state, said = newest(run)
    if said:
        return f"a restore said: {said}"
    if step < at_least:
        return f"step {step} is the newest that is left, though {at_least} had been saved"
    if step and state != session.alone[False].states[step]:
        return f"what is restored of step {step} is not what was saved"
    return ""


def go_on(session: Session, run: Path, *, kept: tuple[str, ...] = (), **options: Any) -> str:
    """Start the run again and let it end; say what is wrong with its end, or what it leaves beside what is `kept`."""
    again = run_alone(run, **options)
    if again.answer is None:
        return f"the next start did not end: {again}"
    found = as_alone(again)
    if found.end != session.end:
        return f"it ends with {found.end[:16]}, not with {session.end[:16]}"
    right = sorted([*session.alone[False].folders, *kept])
    if found.saved and found.folders != right:
        return f"it leaves {found.folders}, not {right}"
    return ""


def judge_death(session: Session, run: Path, first: End, at_least: int, **options: Any) -> str:
    """Judge a process that should have been killed, and the run that goes on after it."""
    if not first.killed:
        return f"the fault did not strike: the run {first}"
    return judge_what_is_left(session, run, at_least) or go_on(session, run, **options)


def kills_before_operations(session: Session, mode: str) -> Iterator[Case]:
    """Yield a kill before every operation of a run (`kill`), or in the middle of every write (`tear`)."""
    for asynchronous, alone in session.alone.items():
        for at, name in enumerate(alone.operations, 1):
            if mode == "tear" and name != "write":
                continue

            def work(folder: Path, at: int = at, asynchronous: bool = asynchronous, alone: Alone = alone) -> str:
                run = folder / NEW_RUN
                options = {**session.options, "asynchronous": asynchronous}
                return judge_death(
                    session, run, training(run, Breaker(at, mode), **options), alone.step_at(at), **options
                )

            when = "before" if mode == "kill" else "in the middle of"
            yield Case(f"killed {when} operation {at}, {name}, {WAY[asynchronous]}", work)


def counted_exactly(session: Session) -> Iterator[Case]:
    """Yield a kill after the last operation, which must not strike: or not all were counted."""
    for asynchronous, alone in session.alone.items():

        def work(folder: Path, asynchronous: bool = asynchronous, alone: Alone = alone) -> Tally:
            first = training(folder / NEW_RUN, Breaker(len(alone.operations) + 1), asynchronous=asynchronous)
            return Tally.of(f"the run {first}" if first.answer != session.end else "", 0)

        yield Case(f"a kill after the last operation, {WAY[asynchronous]}", work)


def kills_at_places(session: Session) -> Iterator[Case]:
    """Yield a kill at every step, at each place that the loop reaches in it."""
    for asynchronous, alone in session.alone.items():
        counted: Counter[str] = Counter()
        for place, saved in alone.places:
            counted[place] += 1

            def work(
                folder: Path, place: str = place, times: int = counted[place], saved: int = saved,
                asynchronous: bool = asynchronous,
            ) -> str:  # fmt: skip
                run = folder / "run"
                options = {**session.options, "asynchronous": asynchronous}
                at_least = 0 if asynchronous else saved  # else it may not be written yet
                return judge_death(session, run, killed_at(run, place, times, **options), at_least, **options)

            yield Case(f"killed {place}, the {counted[place]}. time, {WAY[asynchronous]}", work)


def run_until(folder: Path, step: int) -> Path:
    """Let a run be killed at the beginning of a step, counted from 1, and return its folder."""
    first = killed_at(folder / "run", "at a step's beginning", step)
    if not first.killed:
        raise RuntimeError(f"the run to be interrupted at step {step} {first}")
    return folder / "run"


def copied(base: Path, folder: Path) -> Path:
    shutil.copytree(base, folder, symlinks=True)
    return folder


def going_back(run: Path) -> dict[str, Any]:
    """Return the options of a run that goes back to step 4, and so saves step 6 a second time."""
    return {"resume": str(run / "checkpoint-4")}


def kills_while_replacing(session: Session) -> Iterator[Case]:
    """Yield a kill before every operation of a run that went back and saves a step that is there already."""
    base = run_until(session.root / "base-replacing", 7)
    counted = copied(base, session.root / "counted-replacing")
    alone = as_alone(run_alone(counted, **going_back(counted)))
    for at, name in enumerate(alone.operations, 1):

        def work(folder: Path, at: int = at) -> str:
            run = copied(base, folder / "run")
            first = training(run, Breaker(at), **going_back(run))
            return judge_death(session, run, first, 6)

        yield Case(f"killed before operation {at}, {name}, while step 6 is replaced", work)


def double_faults(session: Session) -> Iterator[Case]:
    """Yield kills in the third save, each followed by kills in the clearing up and the retention of the next one."""
    base = run_until(session.root / "base-double", 5)
    counted = copied(base, session.root / "counted-double")
    alone = as_alone(run_alone(counted))
    operations = alone.operations[: alone.saved[0][1]]
    for at, name in enumerate(operations, 1):
        yield Case(f"killed before operation {at}, {name}, of the third save", partial(_twice, session, base, at))


def _twice(session: Session, base: Path, at: int, folder: Path) -> Tally:
    run = copied(base, folder / "run")
    first = training(run, Breaker(at))
    if not first.killed:
        return Tally.of(f"the fault did not strike: the run {first}")
    counted = copied(run, folder / "counted")
    alone = as_alone(run_alone(counted))
    if not alone.saved:
        return Tally()
    operations = alone.operations[: alone.saved[0][1]]
    clearing = range(1, operations.index("make_folder") + 2)
    last_file = len(operations) - operations[::-1].index("create")
    retention = range(last_file + 1, len(operations) + 1)
    # A half and a fifth after each first kill, each time others: all operations, after first kills of all kinds.
    again = [second for second in clearing if (second + at) % CLEARING_SHARE == 0]
    again += [second for second in retention if (second + at) % RETENTION_SHARE == 0]
    chosen = again[:: 5 if session.quick else 1]
    tally = Tally(ends=Counter({"in the clearing up": len({*chosen} & {*clearing})}))
    tally.ends["in the retention"] = len(chosen) - tally.ends["in the clearing up"]
    for second in chosen:
        tally.add(_second_fault(session, run, folder / f"second-{second}", second, operations[second - 1]))
    return tally


def _second_fault(session: Session, run: Path, folder: Path, at: int, name: str) -> Tally:
    again = copied(run, folder)
    problem = judge_death(session, again, training(again, Breaker(at)), 4)
    shutil.rmtree(again)
    return Tally.of(problem and f"then killed before operation {at}, {name}: {problem}")


def failing_disks(session: Session) -> Iterator[Case]:
    """Yield an operation that fails, or a disk that is full from there on, at every operation of a run."""
    for asynchronous, alone in session.alone.items():
        for mode, words in (("error", "Input/output error"), ("full", "No space left on device")):
            for at, name in enumerate(alone.operations, 1):
                if asynchronous and at % 2 == (mode == "full"):  # there the one and the other by turns
                    continue
                work = partial(_failing, session, alone, at, mode, words, asynchronous)
                yield Case(f"{words.lower()} at operation {at}, {name}, {WAY[asynchronous]}", work)


def _failing(
    session: Session, alone: Alone, at: int, mode: str, words: str, asynchronous: bool, folder: Path
) -> Tally:  # fmt: skip
    run = folder / NEW_RUN
    first = training(run, Breaker(at, mode), asynchronous=asynchronous)
    if first.answer is None:
        end, problem = "ended the run with an error in words", ""
        if words not in first.raised:
            return Tally.of(f"the run {first}, which does not say {words!r}")
    else:
        end = "were tolerated: nothing was lost"
        problem = "the run went on and ended otherwise" if first.answer != session.end else ""
    problem = problem or judge_what_is_left(session, run, alone.step_at(at))
    tally = Tally.of(problem or go_on(session, run, asynchronous=asynchronous))
    tally.ends[end] += 1
    return tally


DAMAGES: dict[str, Callable[[bytes], bytes | None]] = {
    "the first byte changed": lambda content: bytes([content[0] ^ 1]) + content[1:],
    "a byte in the middle changed": lambda content: _flipped(content, len(content) // 2),
    "the last byte changed": lambda content: _flipped(content, len(content) - 1),
    "a byte short": lambda content: content[:-1],
    "cut in half": lambda content: content[: len(content) // 2],
    "empty": lambda content: b"",
    "a byte longer": lambda content: content + b"\0",
    "all zeros": lambda content: bytes(len(content)),
    "gone": lambda content: None,
}


def _flipped(content: bytes, at: int) -> bytes:
    return content[:at] + bytes([content[at] ^ 0x10]) + content[at + 1 :]


def damages(session: Session) -> Iterator[Case]:
    """Yield damages of each file of the newest checkpoint: it must be skipped by name, and the end be the same."""
    base = run_until(session.root / "base-damage", 7)
    for path in sorted((base / "checkpoint-6").rglob("*")):
        if not path.is_file():
            continue
        for kind, damage in DAMAGES.items():
            file = path.relative_to(base).as_posix()
            yield Case(f"{file}: {kind}", partial(_damaged, session, base, file, damage))


def _damaged(
    session: Session, base: Path, file: str, damage: Callable[[bytes], bytes | None], folder: Path
) -> str:  # fmt: skip
    run = copied(base, folder / "run")
    content = damage((run / file).read_bytes())
    if content is None:
        (run / file).unlink()
    else:
        (run / file).write_bytes(content)
    with passed_over() as said:
        step = Checkpointer(run).restore({"model": _Nothing()})
    name = file.partition("/")[2]
    if step != 4 or not any("skipped checkpoint-6" in text and name in text for text in said):
        return f"step {step} is restored, and {said} is said"
    # Without its manifest it could be another program's, and is moved out of the way instead of replaced.
    return go_on(session, run, kept=("checkpoint-6.replaced-1",) if name == MANIFEST and content is None else ())


class _Nothing:
    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take nothing."""
