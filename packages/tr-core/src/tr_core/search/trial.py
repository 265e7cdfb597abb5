"""Draw one set of hyper-parameters: a trial, and its ranges and choices."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tr_core.signatures import parameters_of

Number = int | float


@dataclass(frozen=True)
class Range:
    """Numbers from `low` to `high`, both included.

    Attributes:
        low: the least.
        high: the greatest; with steps, the greatest that is `low` plus a whole number of steps.
        step: distance of neighbours; None for any number between the ends.
        log: whether the logarithm, not the number, is divided evenly.
        whole: whether the numbers are whole.
    """

    low: Number
    high: Number
    step: Number | None
    log: bool
    whole: bool

    def draw(self, generator: random.Random) -> Number:
        """Return one at random, all equally probable (in the logarithm, with `log`)."""
        if self.log and self.whole:
            # Half a unit more on both sides, so that the ends have the probability of their logarithmic width.
            value = math.exp(generator.uniform(math.log(self.low - 0.5), math.log(self.high + 0.5)))
            return min(max(round(value), self.low), self.high)
        if self.log:
            value = math.exp(generator.uniform(math.log(self.low), math.log(self.high)))
            return min(max(value, self.low), self.high)
        if self.step is not None:
            return self._nth(generator.randrange(self._count(self.step)), self.step)
        return generator.uniform(self.low, self.high)

    def points(self, number: int | None) -> list[Number] | None:
        """Return the numbers of a grid: all steps; without steps `number` of them, None if `number` is None."""
        if self.low == self.high:
            return [self.low]
        if self.step is not None:
            return [self._nth(index, self.step) for index in range(self._count(self.step))]
        if number is None:
            return None
        shares = [index / max(number - 1, 1) for index in range(number)]
        if self.log:
            ends = math.log(self.low), math.log(self.high)
            values = [math.exp(ends[0] + share * (ends[1] - ends[0])) for share in shares]
        else:
            values = [self.low + share * (self.high - self.low) for share in shares]
        values = [min(max(value, self.low), self.high) for value in values]
        return sorted({round(value) for value in values}) if self.whole else values

    def _count(self, step: Number) -> int:
        # Rounded, because 0.3 / 0.1 is a little less than 3.
        return math.floor(round((self.high - self.low) / step, 9)) + 1

    def _nth(self, index: int, step: Number) -> Number:
        value = self.low + index * step
        return value if self.whole else min(float(value), float(self.high))


@dataclass(frozen=True)
class Choices:
    """Several values, all equally probable."""

    values: tuple[Any, ...]

    def draw(self, generator: random.Random) -> Any:
        """Return one at random."""
        return self.values[generator.randrange(len(self.values))]

    def points(self, number: int | None) -> list[Any]:
        """Return all of them."""
        return list(self.values)


def float_range(name: str, low: float, high: float, step: float | None, log: bool) -> Range:
    """Return a checked range of numbers."""
    _check(name, low, high, step, log)
    return Range(float(low), float(high), step, log, whole=False)


def int_range(name: str, low: int, high: int, step: int, log: bool) -> Range:
    """Return a checked range of whole numbers."""
    if any(isinstance(value, bool) or value != int(value) for value in (low, high, step)):
        raise ValueError(f"suggest_int({name!r}, {low}, {high}, step={step}) needs whole numbers")
    _check(name, low, high, None if log and step == 1 else step, log)
    return Range(int(low), int(high), None if log else int(step), log, whole=True)


def checked_choices(name: str, values: Sequence[Any]) -> Choices:
    """Return checked choices."""
    if len(values) == 0:
        raise ValueError(f"suggest_categorical({name!r}, []) has nothing to choose from")
    return Choices(tuple(values))


def _check(name: str, low: Number, high: Number, step: Number | None, log: bool) -> None:
    if not low <= high:
        raise ValueError(f"{name!r} is to lie between {low} and {high}; the first must not be greater")
    if log and low <= 0:
        raise ValueError(f"{name!r} from {low} has no logarithm; begin above 0, or leave out log=True")
    if log and step is not None:
        raise ValueError(f"{name!r} has both log=True and step={step}; leave one out")
    if step is not None and step <= 0:
        raise ValueError(f"{name!r} has step={step}; it must be above 0")


class Trial:
    """Draws the values for a search space, with the methods of Optuna's trials.

    A second request for a name returns the same value.
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
    """Draws every value at random, from the search's seed, its own number and the value's name alone."""

    def __init__(self, number: int, seed: int) -> None:
        super().__init__(number)
        self._seed = seed

    def _choose(self, name: str, values: Range | Choices) -> Any:
        return values.draw(random.Random(f"{self._seed}/{self.number}/{name}"))


class GridTrial(Trial):
    """Takes one point of a grid: an index among the choices of each value, in the order of requests.

    Args:
        indices: the point.
        points: number of values from a range without steps; None refuses such a range.
        is_known: whether `indices` is the whole point; else values beyond it take their first choice.
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
    """Repeats the values of another rank's trial."""

    def __init__(self, number: int, params: Mapping[str, Any]) -> None:
        super().__init__(number)
        self.params = dict(params)

    def _choose(self, name: str, values: Range | Choices) -> Any:
        raise ValueError(
            f"{name!r} is asked for after hp_space, which with several processes is too late: ask for it in hp_space"
        )


def takes_trial(model_init: Callable[..., Any]) -> bool:
    """Whether `model_init` takes the trial: as its only required argument, or one called `trial`, or one that is None.

    Arguments with other defaults are ignored: a class with its own options is a `model_init` too.

    Raises:
        ValueError: it needs more than one argument, or one by name.
    """
    try:
        parameters = list(parameters_of(model_init).values())
    except (TypeError, ValueError):  # a callable without a signature
        return False
    named = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    required = [p for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if len(required) > 1 or any(p.kind is p.KEYWORD_ONLY for p in required):
        names = ", ".join(p.name for p in required)
        raise ValueError(
            f"model_init needs the arguments {names}; it may need none, or one, which is the trial of a search or None"
        )
    if required or not named:
        return bool(required)
    return named[0].name == "trial" or (len(named) == 1 and named[0].default is None)


class TrialPrunedError(Exception):
    """Ends the run of a trial that is pruned; a callback may raise it too.

    The search records the trial as pruned and runs the next one.
    """
