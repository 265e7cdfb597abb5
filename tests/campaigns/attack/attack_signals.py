"""Send signals at every phase to every kind of process: scripts, ranks, launchers, notebooks, workers, commands.

What is judged: the exit codes, the closing event and the checkpoint of a run that was asked to stop, processes that are
left, checkpoints that are lost, and whether the next start ends with the bits of a run that was left alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product
from pathlib import Path

import runner
from attacked_commands import cases_of_commands
from attacked_jobs import SHOWN_CHARACTERS, Case, Outcome, Workshop, cases_of, in_mixed_order
from runner import LOST, WRONG_END, Options
from sample_records import read_starts
from strikes import Strike

SOFT = {"TERM": 143, "INT": 130, "USR1": 138}
DEATH = {"TERM": -15, "INT": -2, "USR1": -10, "HUP": -1, "KILL": -9}
NAMES = ("TERM", "INT", "HUP", "USR1", "KILL", "STOP")

# Where signals find a run that saves and stops for them; each with how often the place is reached before.
IN_TRAINING = (
    ("on_train_begin", 1), ("on_epoch_begin", 1), ("on_step_begin", 1), ("dataset", 5), ("collator", 2), ("forward", 3),
    ("backward", 2), ("optimizer", 3), ("schedule", 2), ("on_step_end", 2), ("on_log", 1), ("evaluation dataset", 2),
    ("on_prediction_step", 1), ("metrics", 1), ("on_evaluate", 1), ("state_dict", 1), ("file:create", 2),
    ("file:write", 1), ("file:sync", 3), ("file:rename", 1), ("file:remove_file", 1), ("on_save", 1),
)  # fmt: skip
# `folder` is where it is locked.
BEFORE = (("start", 1), ("model_init", 1), ("on_init_end", 1), ("folder", 2), ("load_state_dict", 1))
WITH_THE_LAST_STEP = (("on_epoch_end", 1), ("on_train_end", 1))
AFTER = (("on_predict", 1), ("closing", 1), ("after", 1), ("atexit", 1))
IN_BACKGROUND = (
    ("file:make_folder", 1), ("file:write", 2), ("file:sync", 4), ("file:rename", 1), ("file:remove_file", 1),
)  # fmt: skip
OF_RANKS = (
    ("dataset", 4), ("forward", 2), ("backward", 3), ("on_pre_optimizer_step", 2), ("on_step_end", 3),
    ("evaluation forward", 1), ("metrics", 1), ("state_dict", 1), ("file:write", 1), ("on_save", 1),
)  # fmt: skip
# Of the groups whose jobs take long, one of so many.
EVERY = {"worker of a loader": 2, "rank": 2, "rank in an exchange": 2, "trainer launch": 2, "torchrun": 3}
OF_LAUNCHERS = (("start", 1), ("forward", 2), ("file:write", 3), ("closing", 1))


def cases(options: Options) -> Iterator[runner.Case]:
    """Yield the attacks, a group after the other."""
    shop = Workshop(options.folder / "workshop of signals")
    for group, attacks in groups(options.seed).items():
        chosen = attacks[:: max(1, len(attacks) // 3)] if options.quick else attacks
        if not (options.quick and chosen[0].start in ("launch", "torchrun")):
            yield from cases_of(group, chosen, partial(_attack, shop))
    yield from cases_of_commands(options.folder / "commands", quick=options.quick)


def groups(seed: int) -> dict[str, list[Case]]:
    """Return the attacks by the kind of process that gets the signal."""
    found = {
        "script": _of_scripts(),
        "script, background save": _in_background(),
        "worker of a loader": _of_workers(),
        "rank": _of_ranks(),
        "rank in an exchange": _in_exchanges(),
        "second signals and storms": _repeated(),
        "notebook": _of_launchers("notebook", ("TERM", "INT", "HUP", "KILL", "STOP")),
        "trainer launch": _of_launchers("launch", NAMES),
        "torchrun": _of_launchers("torchrun", ("TERM", "INT", "HUP", "STOP")),
    }
    return in_mixed_order(found, seed, EVERY)


def _of_scripts() -> list[Case]:
    places = (*BEFORE, *IN_TRAINING, *WITH_THE_LAST_STEP, *AFTER)
    return [
        Case("script", "plain", Strike(place, f"signal:{name}", times), begins=_begins(place))
        for (place, times), name in product(places, NAMES)
    ]


def _begins(place: str) -> str:
    return "resumed" if place == "load_state_dict" else "fresh"


def _in_background() -> list[Case]:
    saves = (("save_async", True),)
    return [
        Case("background", "plain", Strike(place, f"signal:{name}", times), arguments=saves)
        for (place, times), name in product(IN_BACKGROUND, NAMES)
    ]


def _of_workers() -> list[Case]:
    kinds = [(target, name) for target in ("me", "group", "parent") for name in NAMES]
    strikes = [Strike("dataset worker", f"signal:{name}", 3, target=target) for target, name in kinds]
    strikes += [Strike("forward", f"signal:{name}", 2, target="worker") for name in NAMES]
    return [Case("worker", start, strike, workers=2) for start, strike in product(("plain", "ranks"), strikes)]


def _of_ranks() -> list[Case]:
    places = (*BEFORE, *OF_RANKS, *WITH_THE_LAST_STEP, ("on_predict", 1), ("closing", 1))
    return [
        Case("rank", "ranks", Strike(place, f"signal:{name}", times, rank=rank), begins=_begins(place))
        for (place, times), name, rank in product(places, NAMES, (0, 1))
        if (place, rank) != ("folder", 1)  # rank 0 alone locks it
    ]


def _in_exchanges() -> list[Case]:
    """One rank comes late and sends the signal to the other, which waits for it in an exchange."""
    places = (("start", 1), ("on_train_begin", 1), ("forward", 2), ("evaluation forward", 1), ("state_dict", 1))
    return [
        Case("exchange", "ranks", Strike(place, f"signal:{name}", times, rank, f"rank{1 - rank}", delay_s=0.5))
        for (place, times), name, rank in product((*places, ("closing", 1)), NAMES, (0, 1))
    ]


def _repeated() -> list[Case]:
    again = ("TERM,TERM", "INT,INT", "USR1,TERM", "TERM,INT", "TERM,KILL", "INT,HUP", "STOP,TERM")
    hows = [*(f"twice:{names}" for names in again), "storm:TERM", "storm:USR1", "storm:TERM,INT", "storm:STOP,TERM"]
    places = (("forward", 3), ("file:write", 3))
    alone = [Case("again", "plain", Strike(place, how, times)) for (place, times), how in product(places, hows)]
    ranks = [Strike("forward", how, 2, rank=1) for how in hows]
    # The first one waits in an exchange, for the other that sends both.
    ranks += [Strike("forward", f"twice:{names}", 2, 1, "rank0") for names in again[:4]]
    return [*alone, *(Case("again", "ranks", strike) for strike in ranks)]


def _of_launchers(start: str, names: tuple[str, ...]) -> list[Case]:
    cases = []
    for (place, times), name in product(OF_LAUNCHERS, names):
        if place == "closing" and name in ("USR1", "STOP"):
            continue
        cases.append(Case("launcher", start, Strike(place, f"signal:{name}", times, target="parent", delay_s=0.2)))
    ranks = [Strike("forward", f"signal:{name}", 2, rank=1) for name in names]
    return [*cases, *(Case("rank below", start, strike) for strike in ranks)]


def _attack(shop: Workshop, case: Case, folder: Path) -> Outcome:
    out, outcome = shop.strike(case, folder)
    if outcome.problems:
        outcome.word = "not judged further"
        return outcome
    first = read_starts(out, 0)
    wrong = wrong_codes(case, outcome.codes)
    outcome.word = _word(outcome.codes)
    if wrong:
        said = outcome.said[-SHOWN_CHARACTERS:]
        outcome.problems.append((WRONG_END, f"{wrong}: {said}"))
    shop.resume(out, outcome)
    # A second signal ends a run at once.
    is_asked_once = case.strike.how.startswith("signal") or case.strike.how in ("storm:TERM", "storm:USR1")
    is_in_training = case.strike.place in dict((*IN_TRAINING, *IN_BACKGROUND, *OF_RANKS))
    if outcome.word == "stopped as asked" and is_asked_once and is_in_training and case.start != "notebook":
        _judge_stop(case, outcome, first, read_starts(out, 0))
    return outcome


def _judge_stop(case: Case, outcome: Outcome, first: list[list[dict]], now: list[list[dict]]) -> None:
    """A run that was asked to stop fires its closing event, and the next goes on from the very step."""
    notes = first[-1] if first else []
    steps = max([notes[0]["begin"], *(each["step"] for each in notes if "step" in each)], default=0) if notes else 0
    ended = [each["ended"] for each in notes if "ended" in each]
    if not ended or not ended[0].endswith("nterrupted"):
        outcome.problems.append((WRONG_END, f"the closing event was given {ended}"))
    if len(now) > len(first) and now[-1][0]["begin"] != steps:
        outcome.problems.append((LOST, f"stopped at step {steps}, the next began at {now[-1][0]['begin']}"))


def wrong_codes(case: Case, codes: list[int | None]) -> str:
    """Return what is wrong with the exit codes, empty if nothing is."""
    expected = expected_codes(case)
    wrong = [
        f"process {number} ended with {code}, not with {sorted(right)}"
        for number, (code, right) in enumerate(zip(codes, expected, strict=True))
        if code not in right
    ]
    return "; ".join(wrong)


def expected_codes(case: Case) -> list[set[int]]:
    """Return, for each process whose end is seen, the exit codes that are right."""
    how, _, names = case.strike.how.partition(":")
    if case.start in ("launch", "torchrun", "notebook"):
        return [_of_launched(case, names)]
    if how != "signal":
        return _of_repeated(case, how, names)
    if case.workers and case.strike.target in ("me", "worker"):
        # A worker heeds no request to stop but its parent's; when it is gone, so is the run.
        ends = ("HUP", "KILL", "TERM") if case.strike.target == "worker" else ("HUP", "KILL")
        return [{1} if names in ends else {0}] * case.size
    if names == "STOP":
        return [{0}] * case.size
    hit = _hit_rank(case)
    if _is_soft(case, names):
        # What is removed in the background may be removed when the last step is done.
        return [{SOFT[names], 0} if case.group == "background" else {SOFT[names]}] * case.size
    place = case.strike.place
    if place in dict(WITH_THE_LAST_STEP) and names in SOFT:
        return [{0}] * case.size
    own = {DEATH[names], 0} if place == "atexit" and names == "INT" else {DEATH[names]}
    # The others miss it, unless all is done.
    others = {0, 1} if place in dict(AFTER) or place == "on_train_end" else {1}
    return [own if rank == hit else others for rank in range(case.size)]


def _is_soft(case: Case, name: str) -> bool:
    places = dict((*IN_TRAINING, *IN_BACKGROUND, *OF_RANKS, ("dataset worker", 1)))
    return name in SOFT and case.strike.place in places


def _hit_rank(case: Case) -> int:
    target = case.strike.target
    return int(target[4:]) if target.startswith("rank") else case.strike.rank


def _of_repeated(case: Case, how: str, names: str) -> list[set[int]]:
    sent = names.split(",")
    if sent in (["TERM"], ["USR1"]):
        return [{SOFT[sent[0]]}] * case.size
    if "STOP" in sent:  # the next ones come a second later, and end the run at once
        return [{143} if rank == case.strike.rank else {1, 143} for rank in range(case.size)]
    last = {128 + -DEATH[name] for name in sent} if how == "storm" else {128 + -DEATH[sent[-1]]}
    last |= {DEATH[sent[-1]]} if sent[-1] in ("KILL", "HUP") else set()
    return [last if rank == _hit_rank(case) else {1, *last} for rank in range(case.size)]


def _of_launched(case: Case, name: str) -> set[int]:
    if name == "STOP":
        return {0}
    if case.group == "rank below":
        soft = SOFT.get(name, 128 - DEATH[name])
        return {soft} if case.start == "launch" else {1}
    if name == "KILL":
        return {-9}
    if case.start == "torchrun":
        return {1, 128 - DEATH[name], DEATH[name]}
    if case.start == "notebook":
        return {DEATH[name]}
    return {128 - DEATH[name]}


def _word(codes: list[int | None]) -> str:
    if not any(codes):
        return "as if alone"
    if any(code in SOFT.values() for code in codes):
        return "stopped as asked"
    return "killed" if any((code or 0) < 0 for code in codes) else "ended with an error"
