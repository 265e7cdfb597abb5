"""Say in which steps a basis is found anew."""

from __future__ import annotations


def is_due(steps_done: int, gap: int, *, index: int, count: int, staggers: bool) -> bool:
    """Whether a matrix that has a basis finds a new one in the step after `steps_done`.

    Staggered, the matrices take turns, so that no step has the work, or the full gradients, of all: every matrix has
    its turn each `gap` steps, and at most `ceil(count / gap)` of them in the same step. It depends on these numbers
    alone, so that a resumed run goes on as it would have.

    Args:
        steps_done: updates that the matrix has had.
        gap: steps from one basis to the next.
        index: place of the matrix among those that are projected.
        count: how many are.
        staggers: whether they take turns; else all are due in every `gap`-th step.
    """
    return steps_done > 0 and (steps_done + phase(gap, index=index, count=count, staggers=staggers)) % gap == 0


def phase(gap: int, *, index: int, count: int, staggers: bool) -> int:
    """Return how many steps earlier than the first a matrix has its turns."""
    return index * gap // count if staggers else 0
