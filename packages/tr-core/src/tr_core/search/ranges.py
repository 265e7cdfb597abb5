"""What a hyper-parameter may be: a range of numbers, or one of several choices."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Number = int | float


@dataclass(frozen=True)
class Range:
    """Numbers from `low` to `high`, both included.

    Attributes:
        low: the least.
        high: the greatest that is `low` plus a whole number of steps, if there are steps.
        step: distance of neighbours; None for any number in between.
        log: whether the logarithm is divided evenly, not the number.
        whole: whether they are whole numbers.
    """

    low: Number
    high: Number
    step: Number | None
    log: bool
    whole: bool

    def draw(self, generator: random.Random) -> Number:
        """Return one at random, all equally probable (in the logarithm, with `log`)."""
        if self.log and self.whole:
            # Half a unit more on both sides, so that the ends are as probable as their logarithms are wide.
            value = math.exp(generator.uniform(math.log(self.low - 0.5), math.log(self.high + 0.5)))
            return min(max(round(value), self.low), self.high)
        if self.log:
            value = math.exp(generator.uniform(math.log(self.low), math.log(self.high)))
            return min(max(value, self.low), self.high)
        if self.step is not None:
            return self._nth(generator.randrange(self._count(self.step)), self.step)
        return generator.uniform(self.low, self.high)

    def points(self, number: int | None) -> list[Number] | None:
        """Return the numbers of a grid: all steps, or without steps `number` of them; None if that is missing."""
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
        # Through a rounding, since 0.3 / 0.1 is a little less than 3.
        return math.floor(round((self.high - self.low) / step, 9)) + 1

    def _nth(self, index: int, step: Number) -> Number:
        value = self.low + index * step
        return value if self.whole else min(float(value), float(self.high))


@dataclass(frozen=True)
class Choices:
    """One of several values, all equally probable."""

    values: tuple[Any, ...]

    def draw(self, generator: random.Random) -> Any:
        """Return one at random."""
        return self.values[generator.randrange(len(self.values))]

    def points(self, number: int | None) -> list[Any]:
        """Return all of them."""
        return list(self.values)


def float_range(name: str, low: float, high: float, step: float | None, log: bool) -> Range:
    """Return a checked range of numbers.

    Raises:
        ValueError: the ends or the step do not make one.
    """
    _check(name, low, high, step, log)
    return Range(float(low), float(high), step, log, whole=False)


def int_range(name: str, low: int, high: int, step: int, log: bool) -> Range:
    """Return a checked range of whole numbers.

    Raises:
        ValueError: the ends or the step do not make one.
    """
    if any(isinstance(value, bool) or value != int(value) for value in (low, high, step)):
        raise ValueError(f"suggest_int({name!r}, {low}, {high}, step={step}) needs whole numbers")
    _check(name, low, high, None if log and step == 1 else step, log)
    return Range(int(low), int(high), None if log else int(step), log, whole=True)


def checked_choices(name: str, values: Sequence[Any]) -> Choices:
    """Return checked choices.

    Raises:
        ValueError: there are none.
    """
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
