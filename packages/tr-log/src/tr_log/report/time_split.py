"""Divide the wall time of a run, restarts included, among its phases, what was done twice, and the time between."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from tr_log.phases import PHASES
from tr_log.report.run_folder import Session

REDONE, IDLE, OTHER = "redone", "idle", "other"
PARTS = (*PHASES, OTHER, REDONE, IDLE)
"""Names of the parts, in the order of a report."""

WORDS = {
    "start": "preparing and restoring",
    "data": "waiting for data",
    "compute": "computing",
    "exchange": "exchange between processes",
    "evaluation": "evaluating",
    "checkpoint": "saving checkpoints",
    "profile": "writing a profile",
    "other": "not measured",
    "redone": "lost, and done again after a restart",
    "idle": "between two calls of train",
}


def time_split(sessions: Sequence[Session]) -> dict[str, float]:
    """Return the seconds of each part. Their sum is the time from the first start to the last event.

    What a session did after the checkpoint from which it was done again is `redone`. The time from a session's last
    event to the next one's start is `idle`: a killed process cannot say when it died, so the fraction of a second
    since its last event counts there.
    """
    split: dict[str, float] = dict.fromkeys(PARTS, 0.0)
    for number, session in enumerate(sessions):
        later = sessions[number + 1 :]
        # Not only the next one: one after it may have gone further back, for instance behind a damaged checkpoint.
        kept_until = _kept_until(session, min(one.first_step for one in later)) if later else session.end_s
        split[REDONE] += session.end_s - kept_until
        measured = 0.0
        for when, _, phases in session.times:
            if when <= kept_until:
                measured += sum(phases.values())
                for name, seconds in phases.items():
                    split[name if name in PHASES else OTHER] += seconds
        split[OTHER] += max(kept_until - session.start_s - measured, 0.0)
        if later:
            split[IDLE] += _gap(session, later[0])
    return split


def words(sessions: Sequence[Session]) -> dict[str, str]:
    """Return the words for each part in the report of some sessions.

    Where several processes trained and the time of exchanging gradients was not measured, it is part of computing.
    """
    unmeasured = any(
        (session.info.get("world_size") or 1) != 1 and not session.measures_exchange for session in sessions
    )
    return {**WORDS, "compute": "computing, and exchanging gradients"} if unmeasured else WORDS


def wall_time(sessions: Sequence[Session]) -> float:
    """Return the seconds from the first start to the last event, also if machines disagree about the time."""
    gaps = sum(_gap(session, following) for session, following in pairwise(sessions))
    return sum(session.end_s - session.start_s for session in sessions) + gaps


def _gap(session: Session, following: Session) -> float:
    return max(following.start_s - session.end_s, 0.0)


def _kept_until(session: Session, step: int) -> float:
    """Return when a session had done what a later one at `step` did not do again."""
    if session.step <= step:
        return session.end_s
    saved = [mark["time_s"] for mark in session.marks if mark.get("event") == "checkpoint" and mark.get("step") == step]
    if saved:
        return float(saved[-1])
    reached = [when for when, at, _ in session.times if at <= step]
    return reached[-1] if reached else session.start_s
