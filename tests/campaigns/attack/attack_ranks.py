"""Let one rank of two raise, end or be slow in every place where code of a user runs, and see how the job ends.

What is judged: that all ranks end, with exit codes that say so; that the failing rank's own words come first; that the
next start ends with the bits of a run that was left alone. A rank that ends with exit code 0 while the others wait must
not look like a job that is done.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product
from pathlib import Path

import runner
from attacked_jobs import SHOWN_CHARACTERS, Case, Outcome, Workshop, cases_of, in_mixed_order
from runner import WRONG_END, Options
from strikes import WORDS, Strike

# Each with how often it is reached before.
IN_TRAINING = (
    ("on_train_begin", 1), ("on_epoch_begin", 1), ("on_step_begin", 2), ("dataset", 5), ("collator", 2), ("forward", 3),
    ("backward", 2), ("on_micro_batch_end", 2), ("on_pre_optimizer_step", 3), ("optimizer", 3),
    ("on_optimizer_step", 2), ("schedule", 2), ("on_step_end", 3), ("on_log", 1),
)  # fmt: skip
IN_EVALUATION = (
    ("evaluation dataset", 1), ("evaluation forward", 2), ("on_prediction_step", 1), ("logits", 1), ("metrics", 1),
    ("on_evaluate", 1),
)  # fmt: skip
IN_SAVES = (("state_dict", 1), ("file:write", 1), ("file:rename", 1), ("file:remove_file", 1), ("on_save", 1))
BEFORE = (("model_init", 1), ("on_init_end", 1), ("load_state_dict", 1))
AT_THE_END = (("on_epoch_end", 1), ("on_train_end", 1))
# When training is done, another rank may miss the one that fails, or have ended before.
AFTER = (("on_predict", 1), ("closing", 1))
PLACES = (*BEFORE, *IN_TRAINING, *IN_EVALUATION, *IN_SAVES, *AT_THE_END, *AFTER)
# Rank 1 renames and removes nothing.
OF_RANK_0 = ("file:rename", "file:remove_file")

# How a rank fails, and the exit code that is its.
RAISES = {
    "raise:Exception": 1, "raise:BaseException": 1, "raise:SystemExit0": 0, "raise:SystemExit3": 3,
    "raise:KeyboardInterrupt": -2, "raise:MemoryError": 1, "raise:Unprintable": 1, "raise:Unpicklable": 1,
    "raise:StopIteration": 1, "raise:OSError": 1, "raise:EOFError": 1, "raise:TimeoutError": 1, "recurse": 1,
}  # fmt: skip
ENDS = {"exit:7": 7, "exit:0": 0, "segfault": -11}
IN_WORKERS = ("raise:Exception", "raise:StopIteration", "raise:Unpicklable", "raise:Unprintable", "raise:SystemExit0",
              "raise:SystemExit3", "raise:KeyboardInterrupt", "raise:MemoryError", "recurse", "exit:7", "exit:0",
              "segfault")  # fmt: skip
# Of the groups with many, one of so many.
EVERY = {"raises": 2, "ends at once": 2}
TIMEOUT_S, WITHIN_S, BEYOND_S = 8, 3, 14
SLOW_PLACES = (
    ("start", 1), ("model_init", 1), ("load_state_dict", 1), ("forward", 2), ("optimizer", 2),
    ("evaluation forward", 1), ("metrics", 1), ("file:write", 1), ("on_save", 1), ("on_train_end", 1),
)  # fmt: skip
LAUNCHED = (
    ("forward", "raise:Exception"), ("forward", "raise:SystemExit0"), ("forward", "raise:SystemExit3"),
    ("backward", "raise:KeyboardInterrupt"), ("optimizer", "exit:0"), ("metrics", "exit:7"), ("on_save", "segfault"),
    ("dataset", "raise:StopIteration"), ("load_state_dict", "raise:Exception"), ("model_init", "raise:SystemExit0"),
    ("metrics", "raise:Unprintable"), ("file:write", "raise:OSError"),
)  # fmt: skip


def cases(options: Options) -> Iterator[runner.Case]:
    """Yield the attacks, a group after the other."""
    shop = Workshop(options.folder / "workshop of ranks")
    for group, attacks in groups(options.seed).items():
        if not (options.quick and group == "launched"):
            yield from cases_of(group, attacks[:3] if options.quick else attacks, partial(_attack, shop))


def groups(seed: int) -> dict[str, list[Case]]:
    """Return the attacks by the way in which a rank fails; places and ranks alternate."""
    found = {
        "raises": _failing(RAISES),
        "ends at once": _failing(ENDS),
        "in a worker": _in_workers(),
        "slow": _slow(),
        "launched": _launched(),
    }
    return in_mixed_order(found, seed, EVERY)


def _failing(ways: dict[str, int]) -> list[Case]:
    cases = []
    for number, ((place, times), how) in enumerate(product(PLACES, ways)):
        rank = 0 if place in OF_RANK_0 else (number + number // len(ways)) % 2
        # The silent ones on both ranks, of the others every second.
        if ways[how] and how not in ("raise:Exception", "raise:StopIteration") and number % 2 and len(ways) > 4:
            continue
        cases.append(_case("rank", Strike(place, how, times, rank)))
        if not ways[how] and place not in OF_RANK_0:
            cases.append(_case("rank", Strike(place, how, times, 1 - rank)))
    return cases


def _case(group: str, strike: Strike, start: str = "ranks", **more: object) -> Case:
    begins = "resumed" if strike.place == "load_state_dict" else "fresh"
    return Case(group, start, strike, begins=begins, **more)  # type: ignore[arg-type]


def _in_workers() -> list[Case]:
    return [
        _case("worker", Strike(place, how, 1, number % 2), workers=1)
        for number, (place, how) in enumerate(product(("dataset worker", "evaluation dataset worker"), IN_WORKERS))
    ]


def _slow() -> list[Case]:
    limit = (("ddp_timeout", TIMEOUT_S),)
    return [
        _case("slow", Strike(place, f"slow:{seconds}", times, rank), arguments=limit)
        for (place, times), seconds, rank in product(SLOW_PLACES, (WITHIN_S, BEYOND_S), (0, 1))
        if rank == 0 or seconds == BEYOND_S
    ]


def _launched() -> list[Case]:
    times = dict(PLACES)
    return [
        _case("launched", Strike(place, how, times[place], number % 2), start)
        for number, (place, how) in enumerate(LAUNCHED)
        for start in (("launch", "torchrun") if number % 3 == 1 else ("launch",))
    ]


def _attack(shop: Workshop, case: Case, folder: Path) -> Outcome:
    out, outcome = shop.strike(case, folder)
    if outcome.problems:
        outcome.word = "not judged further"
        return outcome
    judge = _judge_launched if case.group == "launched" else _judge_slow if case.group == "slow" else _judge
    said = outcome.said[-SHOWN_CHARACTERS:]
    outcome.problems += [(WRONG_END, f"{wrong}: {said}") for wrong in judge(case, outcome)]
    shop.resume(out, outcome)
    outcome.word = outcome.word or ("done" if not any(outcome.codes) else "ended in words")
    return outcome


def _judge(case: Case, outcome: Outcome) -> Iterator[str]:
    """Yield what is wrong with how the ranks of a job ended of which one failed."""
    own, other = outcome.codes[case.strike.rank], outcome.codes[1 - case.strike.rank]
    how = case.strike.how
    right = {1} if case.group == "worker" else own_codes(case.strike)
    if own not in right:
        yield f"the failing rank ended with {own}, not with {sorted(right)}"
    is_done = case.strike.place in dict((*AFTER, ("on_train_end", 1)))
    if other not in ({0, 1} if is_done else {1}) and not (own == other and case.strike.place in dict(IN_SAVES)):
        yield f"the other ended with {other}"
    if not any(outcome.codes) and not is_done:
        yield "the job looks as if it were done"
    if not (case.group == "worker" and how == "raise:KeyboardInterrupt"):  # which torch's workers end by in silence
        yield from _first_words(how, outcome.said)


def own_codes(strike: Strike) -> set[int]:
    """Return the exit codes that are right for the rank that fails."""
    code = {**RAISES, **ENDS}[strike.how]
    if strike.place in dict(IN_SAVES) and strike.how.startswith("raise"):
        return {code, 1}  # what one rank fails with in a save or a restore, all raise
    return {code, 1} if strike.place == "load_state_dict" else {code}


def _first_words(how: str, said: str) -> Iterator[str]:
    """Yield what is wrong with the first error that is said: the failing rank's own, before what follows from it."""
    kind, _, name = how.partition(":")
    own = {"recurse": "RecursionError", "raise": "Unprintable" if name == "Unprintable" else WORDS}.get(kind)
    if own is None or name in ("SystemExit0", "SystemExit3"):
        return
    consequences = [said.find(words) for words in ("closed by peer", "reset by peer") if words in said]
    if own not in said:
        yield f"its own words are not said: {own}"
    elif consequences and min(consequences) < said.find(own):
        yield "what follows from the failure is said before it"


def _judge_slow(case: Case, outcome: Outcome) -> Iterator[str]:
    """Yield what is wrong with a job of which one rank was slow: within the timeout nothing, beyond it all end."""
    is_within = case.strike.how == f"slow:{WITHIN_S}"
    if is_within and any(outcome.codes):
        yield f"it ended with {outcome.codes}, and the rank was slow for {WITHIN_S} of {TIMEOUT_S} s"
    if not is_within and None in outcome.codes:
        yield f"it ended with {outcome.codes}"
    outcome.word = "done" if not any(outcome.codes) else "ended in words"


def _judge_launched(case: Case, outcome: Outcome) -> Iterator[str]:
    [code] = outcome.codes
    if not code:
        yield f"the launcher ended with {code}"
    own = {**RAISES, **ENDS}[case.strike.how]
    expected = {1} if case.start == "torchrun" or not own else {128 - own if own < 0 else own, 1}
    if code not in expected:
        yield f"the launcher ended with {code}, not with {sorted(expected)}"
    yield from _first_words(case.strike.how, outcome.said)
    report = outcome.said.rpartition("trainer launch: rank ")[2]
    cause, named = report.partition("\nthen ")[0], f": rank {case.strike.rank}: "  # as where both failed together
    names_it = report.startswith(f"{case.strike.rank} of 2 ") or named in cause
    if case.start == "launch" and not names_it:
        yield f"the report begins with {report[:80]!r}"
