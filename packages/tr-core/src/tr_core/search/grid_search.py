"""Search every point of a grid."""

from __future__ import annotations

from tr_core.search.random_search import NumberedSampler
from tr_core.search.samplers import Space
from tr_core.search.trial import GridTrial, Trial


class GridSampler(NumberedSampler):
    """Trials at every point of a grid, the value that is asked for last changing fastest.

    What the space asks for may depend on the values it was given before.

    Args:
        space: the search space; it is called for every point once more, to know how many there are.
        limit: how many trials there may be.
        points: how many values stand for a range without steps; None refuses such a range.

    Raises:
        ValueError: the grid has more points than trials, or a range has no steps.
    """

    def __init__(self, space: Space, limit: int, points: int | None) -> None:
        super().__init__(space)
        if points is not None and points < 1:
            raise ValueError(f"points={points} must be at least 1: the values that stand for a range without steps")
        self.settings = {"backend": "grid", "points": points}
        self._points = points
        self._grid = _walk(space, limit, points)

    def make(self, number: int) -> Trial | None:
        """Return the trial of a number, or None beyond the grid."""
        if number >= len(self._grid):
            return None
        return GridTrial(number, self._grid[number], self._points, is_known=True)


def _walk(space: Space, limit: int, points: int | None) -> list[list[int]]:
    """Return the indices of every point, as an odometer counts."""
    grid: list[list[int]] = []
    indices: list[int] | None = []
    while indices is not None:
        if len(grid) == limit:
            raise ValueError(
                f"the grid has more than n_trials={limit} points; raise n_trials, or make the grid coarser"
            )
        trial = GridTrial(len(grid), indices, points, is_known=False)
        space(trial)
        grid.append([index for index, _ in trial.taken])
        indices = _following(trial.taken)
    return grid


def _following(taken: list[tuple[int, int]]) -> list[int] | None:
    for place in reversed(range(len(taken))):
        index, count = taken[place]
        if index + 1 < count:
            return [*(earlier for earlier, _ in taken[:place]), index + 1]
    return None
