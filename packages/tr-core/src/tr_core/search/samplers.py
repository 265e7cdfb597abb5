"""Generate the trials of a search: at random, at every point of a grid, or with Optuna."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from tr_args.errors import did_you_mean
from tr_core.search.journal import TrialRecord, same_values
from tr_core.search.trial import GridTrial, RandomTrial, Trial

Space = Callable[[Any], dict[str, Any]]


class Sampler(Protocol):
    """Generates trials one after the other; it exists on rank 0 only.

    Attributes:
        settings: the identity of this search, as plain values.
        pruned: exceptions that mean that a trial is pruned, besides this package's own.
    """

    settings: dict[str, Any]
    pruned: tuple[type[Exception], ...]

    def restore(self, records: Sequence[TrialRecord]) -> None:
        """Restore the trials of an earlier call, by number; the last may have been interrupted.

        Raises:
            ValueError: the trials differ from those of this search.
        """
        ...

    def ask(self) -> Any:
        """Return the next trial, or None if there is none; an interrupted one is returned again."""
        ...

    def distributions(self, trial: Any) -> dict[str, str]:
        """Return the distributions of a trial's parameters as text, as far as `restore` needs them."""
        ...

    def report(self, trial: Any, step: int, value: float) -> bool:
        """Record the objective at a step, and return whether to prune the trial."""
        ...

    def tell(self, trial: Any, record: TrialRecord) -> None:
        """Record how a trial ended."""
        ...


def make_sampler(
    backend: str | None, space: Space, directions: Sequence[str], n_trials: int, seed: int, options: dict[str, Any]
) -> Sampler:
    """Return the sampler called `backend`.

    Raises:
        ValueError: there is no such backend, or it does not take an option.
        ImportError: its library is not installed.
    """
    name = str(getattr(backend, "value", backend) or "random").lower()
    if name == "optuna":
        return OptunaSampler(directions, options)
    if name not in _BUILT_IN:
        known = [*_BUILT_IN, "optuna"]
        raise ValueError(f"unknown backend {name!r}; it is one of {', '.join(known)}{did_you_mean(name, known)}")
    taken = _BUILT_IN[name]
    if unknown := [option for option in options if option != taken]:
        other = "; set backend='optuna' for the options of an Optuna study" if backend is None else ""
        raise ValueError(
            f"hyperparameter_search with backend={name!r} does not take {', '.join(unknown)}"
            f"{did_you_mean(unknown[0], _OPTIONS)}; it takes {taken}{other}"
        )
    if name == "grid":
        return GridSampler(space, n_trials, options.get("points"))

    return RandomSampler(space, options.get("seed", seed))


_BUILT_IN = {"random": "seed", "grid": "points"}
_OPTIONS = ("seed", "points", "resume", "timeout", "catch", "hp_name", "compute_objective", "n_trials", "direction")


class NumberedSampler:
    """Trials that are functions of their numbers, so that an interrupted search resumes without a difference."""

    settings: dict[str, Any]
    pruned: tuple[type[Exception], ...] = ()

    def __init__(self, space: Space) -> None:
        self._space = space
        self._next = 0

    def make(self, number: int) -> Trial | None:
        """Return the trial of a number, or None if there is none."""
        raise NotImplementedError

    def restore(self, records: Sequence[TrialRecord]) -> None:
        """Skip the finished trials; see `Sampler`."""
        for record in records:
            trial = self.make(record.number)
            if trial is not None:
                self._space(trial)
            made = {} if trial is None else trial.params
            saved = {name: record.params.get(name) for name in made}  # a model_init may have requested more
            if trial is None or not same_values(made, saved):
                raise ValueError(
                    f"trial {record.number} of the earlier search was made with {record.params}, and hp_space now "
                    f"gives {made}; resume with the same space, which must depend on the trial alone"
                )
            if record.state != "running":
                self._next = max(self._next, record.number + 1)

    def ask(self) -> Trial | None:
        """Return the next trial; see `Sampler`."""
        trial = self.make(self._next)
        self._next += 1
        return trial

    def distributions(self, trial: Any) -> dict[str, str]:
        """Return nothing: the number determines the trial."""
        return {}

    def report(self, trial: Any, step: int, value: float) -> bool:
        """Prune nothing."""
        return False

    def tell(self, trial: Any, record: TrialRecord) -> None:
        """Do nothing: no trial depends on another."""


class RandomSampler(NumberedSampler):
    """Random trials, drawn by `RandomTrial`."""

    def __init__(self, space: Space, seed: int) -> None:
        super().__init__(space)
        self._seed = seed
        self.settings = {"backend": "random", "seed": seed}

    def make(self, number: int) -> Trial:
        """Return the trial of a number."""
        return RandomTrial(number, self._seed)


class GridSampler(NumberedSampler):
    """Trials at every point of a grid; the last requested value changes fastest.

    The requests of the space may depend on earlier values. The space is called once more for every point, to count
    them.

    Raises:
        ValueError: the grid has more points than trials, or a range has no steps.
    """

    def __init__(self, space: Space, limit: int, points: int | None) -> None:
        super().__init__(space)
        if points is not None and points < 1:
            raise ValueError(f"points={points} must be at least 1: the values that stand for a range without steps")
        self.settings = {"backend": "grid", "points": points}
        self._points = points
        self._grid = _grid_points(space, limit, points)

    def make(self, number: int) -> Trial | None:
        """Return the trial of a number, or None beyond the grid."""
        if number >= len(self._grid):
            return None
        return GridTrial(number, self._grid[number], self._points, is_known=True)


def _grid_points(space: Space, limit: int, points: int | None) -> list[list[int]]:
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
        indices = _next_point(trial.taken)
    return grid


def _next_point(taken: list[tuple[int, int]]) -> list[int] | None:
    for place in reversed(range(len(taken))):
        index, count = taken[place]
        if index + 1 < count:
            return [*(earlier for earlier, _ in taken[:place]), index + 1]
    return None


class OptunaSampler:
    """Trials of an Optuna study.

    An interrupted search resumes from its journal: its finished trials are added to a new study. As with Optuna's own
    storages, the sampler's generator is not saved. It is seeded again, so that no draw repeats. With a `storage` among
    the options, Optuna resumes the study in it.

    Raises:
        ImportError: Optuna is not installed.
    """

    def __init__(self, directions: Sequence[str], options: dict[str, Any]) -> None:
        try:
            import optuna
        except ImportError:
            raise ImportError(
                "backend='optuna' needs optuna; pip install 'tr-core[optuna]', or search with backend='random'"
            ) from None
        if options.pop("n_jobs", 1) not in (None, 1):
            raise ValueError("n_jobs must be 1: one Trainer makes one run at a time; share a storage among processes")
        self.settings: dict[str, Any] = {"backend": "optuna"}
        self.pruned: tuple[type[Exception], ...] = (optuna.TrialPruned,)
        self._optuna: Any = optuna
        self._study = self._optuna.create_study(directions=list(directions), **options)
        self._resumed: dict[int, float] = {}  # reports of the interrupted trial, until it resumes
        self._reported: set[int] = set()  # reported steps of the current trial

    def restore(self, records: Sequence[TrialRecord]) -> None:
        """Add the trials of the journal; see `Sampler`."""
        if self._study.trials:  # the user's storage has them
            return
        for record in records:
            self._add(record)
        if records:
            self._study.sampler.reseed_rng()

    def ask(self) -> Any:
        """Return the next trial; see `Sampler`."""
        trial = self._study.ask()
        for step, value in self._resumed.items():
            trial.report(value, step)
        self._reported, self._resumed = set(self._resumed), {}
        return trial

    def distributions(self, trial: Any) -> dict[str, str]:
        """Return the distributions of a trial's parameters, as Optuna's JSON."""
        to_json = self._optuna.distributions.distribution_to_json
        return {name: to_json(distribution) for name, distribution in trial.distributions.items()}

    def report(self, trial: Any, step: int, value: float) -> bool:
        """Report the objective, and return the decision of the study's pruner."""
        if step not in self._reported:  # a trial that resumes from a checkpoint may evaluate a step again
            self._reported.add(step)
            trial.report(value, step)
        return trial.should_prune()

    def tell(self, trial: Any, record: TrialRecord) -> None:
        """Pass the result of a trial to the study."""
        if record.state == "complete":
            self._study.tell(trial, record.values)
        else:
            self._study.tell(trial, state=self._state(record))

    def _add(self, record: TrialRecord) -> None:
        if record.state == "running":
            self._study.enqueue_trial(record.params)
            self._resumed = record.reports
            return
        from_json = self._optuna.distributions.json_to_distribution
        drawn = {name: from_json(text) for name, text in record.distributions.items()}
        self._study.add_trial(
            self._optuna.create_trial(
                state=self._state(record),
                values=record.values if record.state == "complete" else None,
                params={name: record.params[name] for name in drawn},
                distributions=drawn,
                intermediate_values=record.reports,
            )
        )

    def _state(self, record: TrialRecord) -> Any:
        states = self._optuna.trial.TrialState
        return {"complete": states.COMPLETE, "pruned": states.PRUNED, "failed": states.FAIL}[record.state]
