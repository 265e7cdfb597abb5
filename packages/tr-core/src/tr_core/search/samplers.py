"""Where the trials of a search come from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from tr_args.suggestion import did_you_mean
from tr_core.search.journal import TrialRecord

Space = Callable[[Any], dict[str, Any]]


class Sampler(Protocol):
    """Makes trials, one after the other; it lives on rank 0 alone.

    Attributes:
        settings: what tells this search from another, as plain values.
        pruned: exceptions, besides this package's own, that say a trial is pruned.
    """

    settings: dict[str, Any]
    pruned: tuple[type[Exception], ...]

    def restore(self, records: Sequence[TrialRecord]) -> None:
        """Take over the trials of an earlier call, by number; the last may have been interrupted.

        Raises:
            ValueError: they are not those that this search makes.
        """
        ...

    def ask(self) -> Any:
        """Return the next trial, or None if there is none; an interrupted one comes again."""
        ...

    def distributions(self, trial: Any) -> dict[str, str]:
        """Return what a trial's parameters were drawn from, as text, as far as `restore` needs it."""
        ...

    def report(self, trial: Any, step: int, value: float) -> bool:
        """Take in the objective at a step, and say whether to prune the trial."""
        ...

    def tell(self, trial: Any, record: TrialRecord) -> None:
        """Take in how a trial ended."""
        ...


def make_sampler(
    backend: str | None, space: Space, directions: Sequence[str], n_trials: int, seed: int, options: dict[str, Any]
) -> Sampler:
    """Return the sampler called `backend`.

    Args:
        backend: `random` (also None), `grid` or `optuna`; an enum member of that value will do.
        space: the search space.
        directions: `minimize` or `maximize`, for each objective.
        n_trials: how many trials there may be.
        seed: seed for `random`, unless the options have one.
        options: further options of the backend.

    Raises:
        ValueError: there is no such backend, or it does not take an option.
        ImportError: its library is not installed.
    """
    name = str(getattr(backend, "value", backend) or "random").lower()
    if name == "optuna":
        from tr_core.search.optuna_search import OptunaSampler

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
        from tr_core.search.grid_search import GridSampler

        return GridSampler(space, n_trials, options.get("points"))
    from tr_core.search.random_search import RandomSampler

    return RandomSampler(space, options.get("seed", seed))


_BUILT_IN = {"random": "seed", "grid": "points"}
_OPTIONS = ("seed", "points", "resume", "timeout", "catch", "hp_name", "compute_objective", "n_trials", "direction")
