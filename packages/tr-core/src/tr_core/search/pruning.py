"""End a trial early, because others were better at the same step."""

from __future__ import annotations


class TrialPrunedError(Exception):
    """Ends the run of a trial that is not worth going on with; a callback may raise it too.

    The search notes the trial as pruned and goes on with the next one.
    """
