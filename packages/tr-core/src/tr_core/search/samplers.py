"""Draw the trials of a search: at random, at every point of a grid, or by a sampler of Optuna's."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import optuna
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

from tr_args.errors import did_you_mean
from tr_core.search.trial import Space


@dataclass
class Backend:
    """Where the trials of a search come from.

    Attributes:
        settings: the identity of this search, as plain values.
        options: arguments of `optuna.create_study`.
        grid: the values of every trial, by name; None where they are drawn one trial after the other.
    """

    settings: dict[str, Any]
    options: dict[str, Any]
    grid: list[dict[str, Any]] | None = None


_TAKEN = {"random": "seed", "grid": "points"}
_KNOWN = ("seed", "points", "resume", "timeout", "catch", "hp_name", "compute_objective", "n_trials", "direction")


def choose_backend(
    name: str, is_default: bool, space: Space, n_trials: int, seed: int, options: dict[str, Any]
) -> Backend:
    """Return the backend called `name`.

    Args:
        name: `random`, `grid` or `optuna`.
        is_default: whether the user named none.
        space: what a grid is made of.
        n_trials: the most points that a grid may have.
        seed: that of the arguments, which a random search uses if its options have none.
        options: those of the backend.

    Raises:
        ValueError: there is no such backend, it does not take an option, or there is no such grid.
    """
    if name == "optuna":
        if options.pop("n_jobs", 1) not in (None, 1):
            raise ValueError("n_jobs must be 1: one Trainer makes one run at a time; share a storage among processes")
        return Backend({"backend": name}, options)
    if name not in _TAKEN:
        known = [*_TAKEN, "optuna"]
        raise ValueError(f"unknown backend {name!r}; it is one of {', '.join(known)}{did_you_mean(name, known)}")
    taken = _TAKEN[name]
    if unknown := [option for option in options if option != taken]:
        other = "; set backend='optuna' for the options of an Optuna study" if is_default else ""
        raise ValueError(
            f"hyperparameter_search with backend={name!r} does not take {', '.join(unknown)}"
            f"{did_you_mean(unknown[0], _KNOWN)}; it takes {taken}{other}"
        )
    unpruned = {"pruner": optuna.pruners.NopPruner()}
    if name == "grid":
        points = options.get("points")
        return Backend({"backend": name, "points": points}, unpruned, grid_points(space, n_trials, points))
    seed = options.get("seed", seed)
    return Backend({"backend": name, "seed": seed}, {"sampler": SeededSampler(seed), **unpruned})


class SeededSampler(optuna.samplers.RandomSampler):
    """Draws every value from the search's seed, the trial's number and the value's name alone.

    So an interrupted search that resumes finds what it would have found.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._seed = seed

    def sample_independent(self, study: Any, trial: Any, param_name: str, param_distribution: Any) -> Any:
        """Return a value of a distribution."""
        seed = zlib.crc32(f"{self._seed}/{trial.number}/{param_name}".encode())
        return optuna.samplers.RandomSampler(seed).sample_independent(study, trial, param_name, param_distribution)


def grid_points(space: Space, limit: int, points: int | None) -> list[dict[str, Any]]:
    """Return the values of every point of a grid; the last requested value changes fastest.

    The requests of the space may depend on earlier values: it is called once for every point.

    Args:
        space: requests the values.
        limit: the most points.
        points: number of values from a range without steps; None refuses such a range.

    Raises:
        ValueError: the grid has more points than the limit, or a range has no steps.
    """
    if points is not None and points < 1:
        raise ValueError(f"points={points} must be at least 1: the values that stand for a range without steps")
    grid: list[dict[str, Any]] = []
    indices: list[int] | None = []
    while indices is not None:
        if len(grid) == limit:
            raise ValueError(
                f"the grid has more than n_trials={limit} points; raise n_trials, or make the grid coarser"
            )
        trial = GridTrial(len(grid), indices, points)
        space(trial)
        grid.append(trial.params)
        indices = _next_point(trial.taken)
    return grid


def _next_point(taken: list[tuple[int, int]]) -> list[int] | None:
    """Return the indices after those of a point, as an odometer counts; None after the last."""
    for place in reversed(range(len(taken))):
        index, count = taken[place]
        if index + 1 < count:
            return [*(earlier for earlier, _ in taken[:place]), index + 1]
    return None


class GridTrial:
    """Takes one point of a grid: an index among the values of each request, in their order; beyond them the first.

    Attributes:
        params: the values, by name.
        taken: the index of each value, and of how many.
    """

    def __init__(self, number: int, indices: Sequence[int], points: int | None) -> None:
        self.number = number
        self.params: dict[str, Any] = {}
        self.taken: list[tuple[int, int]] = []
        self._indices, self._points = indices, points

    def suggest_float(
        self, name: str, low: float, high: float, *, step: float | None = None, log: bool = False
    ) -> float:
        """Return a number from `low` to `high`."""
        return self._take(name, FloatDistribution(low, high, log=log, step=step))

    def suggest_int(self, name: str, low: int, high: int, *, step: int = 1, log: bool = False) -> int:
        """Return a whole number from `low` to `high`, both included."""
        return self._take(name, IntDistribution(low, high, log=log, step=step))

    def suggest_categorical(self, name: str, choices: Sequence[Any]) -> Any:
        """Return one of `choices`."""
        return self._take(name, CategoricalDistribution(tuple(choices)))

    def _take(self, name: str, distribution: Any) -> Any:
        if name not in self.params:
            values = _grid_values(name, distribution, self._points)
            place = len(self.taken)
            index = self._indices[place] if place < len(self._indices) else 0
            self.taken.append((index, len(values)))
            self.params[name] = values[index]
        return self.params[name]


def _grid_values(name: str, distribution: Any, points: int | None) -> list[Any]:
    """Return the values of a grid: all choices, all steps, or `points` numbers of a range without steps."""
    if isinstance(distribution, CategoricalDistribution):
        return list(distribution.choices)
    low, high, step = distribution.low, distribution.high, distribution.step
    if low == high:
        return [low]
    if step is not None and not distribution.log:  # whole numbers have a step of 1 in a logarithm too
        return [min(low + index * step, high) for index in range(round((high - low) / step) + 1)]
    if points is None:
        raise ValueError(
            f"{name!r} has no steps to make a grid of; give step=, choices, points= for every such range, or "
            "search with backend='random'"
        )
    shares = [index / max(points - 1, 1) for index in range(points)]
    values = [low * (high / low) ** share if distribution.log else low + share * (high - low) for share in shares]
    values = [min(max(value, low), high) for value in values]
    return sorted({round(value) for value in values}) if isinstance(distribution, IntDistribution) else values
