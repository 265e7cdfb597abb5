"""Choose the best trial of a search, or with several objectives all that no other trial beats."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from tr_core.search.journal import TrialRecord


class BestRun(NamedTuple):
    """The best trial of a search.

    Attributes:
        run_id: the trial's number as text; its files are in `run-<run_id>`.
        objective: what it reached; a list where there are several objectives.
        hyperparameters: what the trial was asked for and the arguments that it set, with the types they had.
        run_summary: every trial of the search, as the dicts that `trials.jsonl` holds.
    """

    run_id: str
    objective: float | list[float]
    hyperparameters: dict[str, Any]
    run_summary: Any = None


def choose_best(records: Sequence[TrialRecord], directions: Sequence[str]) -> BestRun | list[BestRun]:
    """Return the best of the complete trials, the earliest of equal ones; a list with several directions.

    Raises:
        ValueError: no trial is complete.
    """
    complete = [record for record in records if record.state == "complete"]
    if not complete:
        states = [record.state for record in records]
        counts = ", ".join(f"{states.count(state)} {state}" for state in sorted(set(states))) or "none was made"
        failures = [record.error for record in records if record.error]
        last = f"; the last failure is {failures[-1]}" if failures else ""
        raise ValueError(f"no trial of the search is complete ({counts}){last}; there is no best one")
    summary = [record.as_dict() for record in records]
    costs = [_costs(record, directions) for record in complete]
    if len(directions) == 1:
        return _run(complete[costs.index(min(costs))], summary)
    return [
        _run(record, summary)
        for record, mine in zip(complete, costs, strict=True)
        if not any(_beats(other, mine) for other in costs)
    ]


def _costs(record: TrialRecord, directions: Sequence[str]) -> list[float]:
    values = zip(record.values, directions, strict=True)
    return [-value if direction == "maximize" else value for value, direction in values]


def _beats(one: list[float], other: list[float]) -> bool:
    return one != other and all(a <= b for a, b in zip(one, other, strict=True))


def _run(record: TrialRecord, summary: list[dict[str, Any]]) -> BestRun:
    objective = record.values[0] if len(record.values) == 1 else list(record.values)
    return BestRun(str(record.number), objective, record.hyperparameters, summary)
