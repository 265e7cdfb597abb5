"""Make a run in every way that applies, and say where they differ."""

import itertools
import shutil
import tempfile
import traceback
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from by_hand import ByHand
from fuzz_comparable import by_hand_knows, transformers_is_right
from fuzz_habits import HABITS, Acts, Stopped
from fuzz_ranks import train_in_ranks
from fuzz_trace import (
    EXACT,
    difference_of_batches,
    difference_of_ends,
    difference_of_evaluations,
    difference_of_events,
    difference_of_logs,
    difference_of_steps,
    tolerance_of,
)
from fuzz_trainers import OURS, REFERENCE, assigned_to, train

REFUSALS = (ValueError, TypeError, AttributeError, RuntimeError)
_MEMORY = Path("/dev/shm")


@contextmanager
def _folder():
    path = tempfile.mkdtemp(prefix="fuzz_", dir=_MEMORY if _MEMORY.is_dir() else None)
    try:
        yield Path(path)
    finally:
        shutil.rmtree(path, ignore_errors=True)


def ours(run, folder):
    """Train with ours, without a break."""
    if run.ranks > 1:
        return train_in_ranks(run, folder)
    return train(OURS, run, folder, Acts(run))


def reference(run, folder):
    """Train with transformers, without a break."""
    return train(REFERENCE, run, folder, Acts(run))


def resumed(run, folder):
    """Train with ours to where the run is stopped, and resume in another Trainer, for every stop."""
    for stop in run.stops:
        acts = Acts(run, stop)
        trace = _again(run, folder, acts)
        has_ended = trace.logs and trace.logs[-1]["step"] >= run.steps
        if trace.error is None and (has_ended or not acts.has_stopped) and run.ranks == 1:
            return trace
        if trace.error is not None and not isinstance(trace.error, Stopped | KeyboardInterrupt | SystemExit):
            return trace
    return _again(run, folder, Acts(run))


def changed(run, folder):
    """Train with ours to where the run is stopped, and resume it as another run."""
    before = _again(run, folder, Acts(run, run.stops[0]))
    if before.error is not None:
        return before
    after = _again(run.after_the_change(), folder, Acts(run))
    # Ranks tell of none.
    return replace(after, batches=[*before.batches, *after.batches] if before.batches and after.batches else [])


def _again(run, folder, acts):
    if run.ranks > 1:
        return train_in_ranks(run, folder, acts.stop, "auto")
    return train(OURS, run, folder, acts, resume="auto")


def by_hand(run):
    """Train by hand."""
    acts = Acts(run)
    hand = ByHand(run, acts.tell)
    acts.before(hand)
    try:
        for _ in range(1 + run.twice):
            hand.train()
        if run.around == "after":
            hand.evaluate()
        if run.around == "predict":
            hand.predict()
    except Exception as error:  # what a user does may be impossible for anybody
        hand.trace.error = error
    return hand.trace


def check(run):
    """Make a run in every way that applies.

    Returns:
        What was compared, by the oracles' names, and the first discrepancy of each oracle that finds one.
    """
    compared, found = [], {}
    with _folder() as folder:
        mine = changed(run, folder / "ours") if run.changed else ours(run, folder / "ours")
        if run.stops and not run.changed:
            compared.append("uninterrupted")
            found["uninterrupted"] = _against_uninterrupted(mine, resumed(run, folder / "resumed"))
        if run.assigned:
            compared.append("never assigned")
            found["never assigned"] = _against_unassigned(run, ours(replace(run, assigned=()), folder / "plain"), mine)
        if run.mesh and not run.changed:
            is_refused = mine.error is not None and _may_be_refused(run, mine.error)
            compared.append("refused" if is_refused else "one process")
            options = tuple((name, value) for name, value in run.options if not name.startswith("pp_"))
            alone = ours(replace(run, mesh=(), ranks=1, options=options), folder / "alone")
            found["one process"] = None if is_refused else _against_one_process(run, alone, mine)
        if transformers_is_right(run):
            compared.append("transformers")
            theirs = reference(run, folder / "reference")
            is_refused = mine.error is not None and _may_be_refused(run, mine.error)
            found["transformers"] = None if is_refused else _against_reference(run, theirs, mine)
    if by_hand_knows(run):
        is_refused = mine.error is not None and _may_be_refused(run, mine.error)
        compared.append("refused" if is_refused else "by hand")
        found["by hand"] = None if is_refused else _against_hand(run, by_hand(run), mine)
    return compared, {oracle: words for oracle, words in found.items() if words is not None}


def _may_be_refused(run, error):
    """Whether an exception refuses, in words, what may be refused."""
    names = {name for name, _ in run.habits}
    # Of a model that is one layer, a new head leaves nothing that an optimizer of before would train.
    may_be = any(HABITS[name].refusable for name in names) or (
        run.model == "linear" and "set_the_optimizer" in names and any(n.startswith("take_a_new_head") for n in names)
    )
    may_be |= any(f"{name}_size" in str(error) for name, _ in run.mesh) or (bool(run.mesh) and "DTensor" in str(error))
    return may_be and isinstance(error, REFUSALS) and len(str(error)) > 60


def _failed(trace):
    error = trace.error
    places = [f" at {Path(p.filename).name}:{p.lineno}" for p in traceback.extract_tb(error.__traceback__)[-1:]]
    return f"{type(error).__name__}{''.join(places)}: {str(error)[:300]}"  # that of a rank comes without its places


def _against_hand(run, hand, mine):
    if mine.error is not None or hand.error is not None:
        if mine.error is not None and hand.error is not None:
            return None
        return f"it ended with {_failed(mine)}" if hand.error is None else f"only by hand it ended with {_failed(hand)}"
    return (
        (difference_of_batches(hand, mine) if mine.batches else None)
        or difference_of_steps(hand, mine, tolerance_of(run))
        or difference_of_evaluations(hand, mine, tolerance_of(run))
        or difference_of_ends(hand, _with_all_moments(hand, mine) if run.mesh else mine, tolerance_of(run))
    )


def _against_reference(run, theirs, mine):
    if theirs.error is not None or mine.error is not None:
        return _alone_failed("transformers", theirs, mine)
    return (
        difference_of_batches(theirs, mine)
        or difference_of_logs(theirs, mine, tolerance_of(run))
        or difference_of_events(theirs, mine)
        or difference_of_ends(theirs, mine, tolerance_of(run))
    )


def _alone_failed(name, theirs, mine):
    if theirs.error is not None and mine.error is not None:
        return None
    who, trace = ("it", mine) if theirs.error is None else (name, theirs)
    return f"{who} alone ended with {_failed(trace)}"


def _against_one_process(run, alone, mine):
    if alone.error is not None or mine.error is not None:
        return _alone_failed("one process", alone, mine)
    return (
        difference_of_logs(_without_loads(alone), _without_loads(mine), tolerance_of(run))
        or difference_of_events(_without_batches(alone), _without_batches(mine))
        or difference_of_ends(alone, _with_all_moments(alone, mine), tolerance_of(run))
    )


def _with_all_moments(whole, mine):
    """Leave the optimizer's state out of the comparison: a process of a mesh has a part of it."""
    return replace(mine, moments=whole.moments)


def _without_batches(trace):
    """Leave out what is told of each micro-batch, which replicas share out, and stages take in turn."""
    return replace(
        trace, events=[event for event in trace.events if event[0] not in ("substep_end", "prediction_step")]
    )


def _without_loads(trace):
    """Leave out what experts alone measure, and operations, of which replicas make fewer on shorter rows."""
    left_out = ("expert_load_max", "total_flos")
    return replace(trace, logs=[{n: v for n, v in entry.items() if n not in left_out} for entry in trace.logs])


def _against_uninterrupted(alone, resumed):
    if alone.error is not None or resumed.error is not None:
        if alone.error is not None and resumed.error is not None and str(alone.error) == str(resumed.error):
            return None
        who, trace = ("resumed, it", resumed) if alone.error is None else ("uninterrupted, it", alone)
        return f"{who} ended with {_failed(trace)}"
    return difference_of_logs(_of_all(alone), _of_all(resumed), EXACT) or difference_of_ends(alone, resumed, EXACT)


def _against_unassigned(run, plain, mine):
    if plain.error is not None or mine.error is not None:
        return None if plain.error is not None else f"it ended with {_failed(mine)}"
    assigned = {name: value for name, value in assigned_to(run).items() if value is not None}  # None is 'unset'
    expected = {**plain.arguments, **assigned}
    changed = {n: (v, mine.arguments[n]) for n, v in expected.items() if mine.arguments[n] != v}
    if changed:
        return f"arguments ended otherwise: {changed}"
    return difference_of_logs(_of_all(plain), _of_all(mine), EXACT) or difference_of_ends(plain, mine, EXACT)


def _of_all(trace):
    """Leave out the closing entry, which is of the call's own steps."""
    return replace(trace, logs=[entry for entry in trace.logs if "total_flos" not in entry])


def shrink(run, oracle, tries=80):
    """Return the plainest run that the search reaches in which an oracle still finds something, and what it finds."""
    run, words, left, is_done = replace(run, family="plain"), None, itertools.count(), False
    while not is_done:
        is_done = True
        for plainer in run.plainer():
            if next(left) >= tries:
                return run, words
            try:
                _, found = check(plainer)
            except Exception:  # a description that nobody can make a run of
                continue
            if oracle in found:
                run, words, is_done = plainer, found[oracle], False
                break
    return run, words
