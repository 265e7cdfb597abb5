"""One set of hyper-parameters: what a search space asks for its values."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from tr_core.search.ranges import Choices, Range, checked_choices, float_range, int_range


class Trial:
    """Answers a search space, with the methods that Optuna's trials have.

    Asked twice for one name, it gives the same value.

    Args:
        number: place among the trials of the search, from 0.

    Attributes:
        params: what it was asked for so far, by name.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.params: dict[str, Any] = {}
        self._ranges: dict[str, Range | Choices] = {}

    def suggest_float(
        self, name: str, low: float, high: float, *, step: float | None = None, log: bool = False
    ) -> float:
        """Return a number from `low` to `high`; `log` searches its logarithm evenly."""
        return self._suggest(name, float_range(name, low, high, step, log))

    def suggest_int(self, name: str, low: int, high: int, *, step: int = 1, log: bool = False) -> int:
        """Return a whole number from `low` to `high`, both included."""
        return self._suggest(name, int_range(name, low, high, step, log))

    def suggest_categorical(self, name: str, choices: Sequence[Any]) -> Any:
        """Return one of `choices`."""
        return self._suggest(name, checked_choices(name, choices))

    def _suggest(self, name: str, values: Range | Choices) -> Any:
        if name not in self.params:
            self._ranges[name] = values
            self.params[name] = self._choose(name, values)
        elif self._ranges.get(name, values) != values:
            raise ValueError(f"{name!r} is asked for twice, from {self._ranges[name]} and from {values}; keep one")
        return self.params[name]

    def _choose(self, name: str, values: Range | Choices) -> Any:
        raise NotImplementedError


class RandomTrial(Trial):
    """Draws every value at random, by the seed of the search, its own number and the value's name alone.

    Args:
        number: place among the trials of the search.
        seed: seed of the search.
    """

    def __init__(self, number: int, seed: int) -> None:
        super().__init__(number)
        self._seed = seed

    def _choose(self, name: str, values: Range | Choices) -> Any:
        return values.draw(random.Random(f"{self._seed}/{self.number}/{name}"))


class GridTrial(Trial):
    """Goes to one point of a grid: for each value, in the order they are asked for, the index among its choices.

    Args:
        number: place among the trials of the search.
        indices: the point.
        points: how many values stand for a range that has no steps; None refuses such a range.
        is_known: whether `indices` is the whole point; else values beyond it take their first choice.

    Attributes:
        taken: for each value asked for, the index and the number of choices.
    """

    def __init__(self, number: int, indices: Sequence[int], points: int | None, *, is_known: bool) -> None:
        super().__init__(number)
        self._indices, self._points, self._is_known = indices, points, is_known
        self.taken: list[tuple[int, int]] = []

    def _choose(self, name: str, values: Range | Choices) -> Any:
        place = len(self.taken)
        if self._is_known and place >= len(self._indices):
            raise ValueError(f"{name!r} is asked for after hp_space, which for a grid is too late: ask in hp_space")
        grid = values.points(self._points)
        if grid is None:
            raise ValueError(
                f"{name!r} has no steps to make a grid of; give step=, choices, points= for every such range, or "
                "search with backend='random'"
            )
        index = self._indices[place] if place < len(self._indices) else 0
        self.taken.append((index, len(grid)))
        return grid[index]


class FixedTrial(Trial):
    """Gives the values that another rank's trial was given.

    Args:
        number: place among the trials of the search.
        params: the values.
    """

    def __init__(self, number: int, params: Mapping[str, Any]) -> None:
        super().__init__(number)
        self.params = dict(params)

    def _choose(self, name: str, values: Range | Choices) -> Any:
        raise ValueError(
            f"{name!r} is asked for after hp_space, which with several processes is too late: ask for it in hp_space"
        )
