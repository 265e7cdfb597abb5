"""One trial of a search: what it set and found, and its values where they are known already."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from tr_core.signatures import parameters_of

Space = Callable[[Any], dict[str, Any]]


@dataclass
class TrialRecord:
    """The record of a trial.

    Attributes:
        state: `running`, or how it ended: `complete`, `pruned` or `failed`.
        name: its name from `hp_name`.
        params: its suggested values, by name.
        arguments: the training arguments that it set.
        values: its objectives.
        reports: the objective at each evaluation during training, by step; empty with several objectives.
        distributions: the distributions of its suggested values, by name, as Optuna's JSON.
    """

    number: int
    state: str = "running"
    name: str | None = None
    params: dict[str, Any] = field(default_factory=dict)
    arguments: dict[str, Any] = field(default_factory=dict)
    values: list[float] = field(default_factory=list)
    reports: dict[int, float] = field(default_factory=dict)
    distributions: dict[str, str] = field(default_factory=dict)
    error: str | None = None

    @property
    def hyperparameters(self) -> dict[str, Any]:
        """Its suggested values and the arguments that it set; an argument wins over a value of the same name."""
        return {**self.params, **self.arguments}

    def as_dict(self) -> dict[str, Any]:
        """Return the record as plain values."""
        return asdict(self)


class FixedTrial:
    """Repeats the values of a trial whose space has been asked: on every rank, and at a point of a grid.

    Args:
        params: the values, by name.
        where: where no further value can be drawn, for the error.
    """

    def __init__(self, number: int, params: Mapping[str, Any], where: str) -> None:
        self.number = number
        self.params = dict(params)
        self._where = where

    def suggest_float(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Return the value called `name`.

        Raises:
            ValueError: the space did not ask for it.
        """
        if name not in self.params:
            raise ValueError(
                f"{name!r} is asked for after hp_space, which {self._where} is too late: ask for it in hp_space"
            )
        return self.params[name]

    suggest_int = suggest_categorical = suggest_float


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
