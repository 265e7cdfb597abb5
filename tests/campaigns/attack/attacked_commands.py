"""Stop the commands that look after checkpoints in the middle: what they work on must stay whole, and bear a repeat."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import runner
from attacked_jobs import LIMIT_S, PROGRAM, SHOWN_CHARACTERS, Outcome, cases_of
from rank_programs import End, nursery
from runner import HUNG, LOST, WRONG_END
from strikes import Strike

WORDS = {
    "verify": ["verify", "run"],
    "prune": ["prune", "run", "--keep", "1", "--yes"],
    "export": ["export", "run/checkpoint-4", "model"],
    "export over another": ["export", "run/checkpoint-4", "older", "--overwrite"],
    "import": ["import", "theirs/checkpoint-7", "run"],
    "seal": ["seal", "run/checkpoint-4", "--yes"],
}
CODES = {"TERM": {-15}, "INT": {130, -2}, "HUP": {-1}, "USR1": {-10}, "KILL": {-9}, "STOP": {0}}
# Operations on files before which a signal comes; where a command does fewer, it is not struck, and not counted.
OPERATIONS = (1, 3, 8, 20)


@dataclass(frozen=True)
class CommandCase:
    """One attack on a command."""

    command: str
    strike: Strike

    def __str__(self) -> str:
        return f"trainer ckpt {self.command}: {self.strike}"


def cases_of_commands(place: Path, *, quick: bool) -> Iterator[runner.Case]:
    """Yield the attacks on commands."""
    words = ["--plain", "--rows", "12", "--arguments", '{"save_total_limit": null}']
    nursery(PROGRAM).run(1, [place / "out", *words], place.with_name("commands-job"), LIMIT_S)
    (place / "out" / "run").rename(place / "run")
    shutil.rmtree(place / "out")
    _make_foreign(place / "theirs")
    (place / "older").mkdir()
    shutil.copy(place / "run" / "checkpoint-2" / "model.safetensors", place / "older")
    whole = {command: _after(place, command) for command in WORDS}
    places = [("start", 1), *(("file", times) for times in OPERATIONS)]
    cases = [
        CommandCase(command, Strike(where, f"signal:{name}", times))
        for command, (where, times), name in product(WORDS, places, CODES)
        if (where == "file" and command != "verify") or name in ("TERM", "INT") or command == "verify" == where
    ]
    yield from cases_of("trainer ckpt", cases[::20] if quick else cases, partial(_attack, place, whole))


def _make_foreign(folder: Path) -> None:
    """Write what the Trainer of transformers writes, with the help of tr-ckpt's own tests."""
    path = Path(__file__).parents[3] / "packages" / "tr-ckpt" / "tests" / "ckpt_foreign.py"
    specification = importlib.util.spec_from_file_location("ckpt_foreign", path)
    assert specification is not None
    assert specification.loader is not None
    foreign: Any = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(foreign)
    parts = foreign.make()
    foreign.train(parts, 7)
    foreign.save(folder, 7, parts)


def _run(place: Path, command: list[str], strike: Strike | None = None) -> End:
    names = {"run", "model", "older"}
    given = [str(place / word) if "/" in word or word in names else word for word in command]
    struck = [] if strike is None else ["--strike", strike.words()]
    words = [place / "out", "--plain", *struck, f"--command={json.dumps(given)}"]
    [end] = nursery(PROGRAM).run(1, words, Path(tempfile.mkdtemp(dir=place.parent)), LIMIT_S)
    return end


def _after(place: Path, command: str) -> dict[str, str]:
    """Return what is there after a command that is left alone."""
    copy = place.with_name(f"after-{command}".replace(" ", "-"))
    shutil.copytree(place, copy)
    end = _run(copy, WORDS[command])
    if end.code:
        raise RuntimeError(f"trainer ckpt {command} ended with {end.code}: {end.said}")
    return digests(copy)


def _attack(place: Path, whole: dict[str, dict[str, str]], case: CommandCase, folder: Path) -> Outcome:
    copy, outcome = folder / "copy", Outcome(case)
    shutil.copytree(place, copy)
    end = _run(copy, WORDS[case.command], case.strike)
    if not (copy / "out" / "struck").exists():
        outcome.word = "not struck"
        return outcome
    outcome.word = "as if alone" if end.code == 0 else "killed"
    said = end.said[-SHOWN_CHARACTERS:]
    right = CODES[case.strike.how.partition(":")[2]]
    if end.code is None:
        outcome.problems.append((HUNG, f"{said}"))
    elif end.code not in right:
        outcome.problems.append((WRONG_END, f"ended with {end.code}, not with {sorted(right)}: {said}"))
    checked = _run(copy, WORDS["verify"])
    if checked.code:
        outcome.problems.append((LOST, f"a checkpoint is damaged: {checked.said[-SHOWN_CHARACTERS:]}"))
    _repeat(copy, case, outcome)
    if (found := digests(copy)) != whole[case.command]:
        differing = sorted(set(found.items()) ^ set(whole[case.command].items()))
        outcome.problems.append((LOST, f"repeated, it leaves other files: {differing[:6]}"))
    return outcome


def _repeat(copy: Path, case: CommandCase, outcome: Outcome) -> None:
    again = _run(copy, WORDS[case.command])
    if again.code == 2 and "exists" in again.said:  # it had been done, or says what to do
        if case.command == "export":
            again = _run(copy, [*WORDS[case.command], "--overwrite"])
        else:
            return
    if again.code:
        said = again.said[-SHOWN_CHARACTERS:]
        outcome.problems.append((WRONG_END, f"repeated, it ended with {again.code}: {said}"))


def digests(place: Path) -> dict[str, str]:
    """Return what each file holds but for times, and the names of what is left over."""
    found = {}
    for path in sorted(place.rglob("*")):
        name = path.relative_to(place).as_posix()
        if path.is_file() and not name.startswith("out"):
            # A manifest notes when it was written.
            is_dated = path.name == "manifest.json"
            found[name] = "" if is_dated else hashlib.sha256(path.read_bytes()).hexdigest()[:8]
    return found
