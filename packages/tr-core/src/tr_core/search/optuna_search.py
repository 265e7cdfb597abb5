"""Search with Optuna: its samplers, its pruners, several objectives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tr_core.search.journal import TrialRecord, same_values


class OptunaSampler:
    """Trials of an Optuna study.

    An interrupted search is made again from its journal: each finished trial is drawn once more, so that a sampler with
    a seed stands where it stood, and told its result. A sampler without one draws other values; the finished trials are
    then added to a new study as they were.

    Args:
        directions: `minimize` or `maximize`, for each objective.
        options: arguments of `optuna.create_study`. With a `storage` of its own, the study there is gone on with as
            Optuna does.

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
        self._options, self._directions = options, list(directions)
        self._study = self._optuna.create_study(directions=self._directions, **options)
        self._pending: Any = None
        self._reported: set[int] = set()  # steps of the trial at hand

    def restore(self, records: Sequence[TrialRecord]) -> None:
        """Make the study as it was; see `Sampler`."""
        if self._study.trials:  # a storage of the user's own kept them
            return
        if not all(self._draw_again(record) for record in records):
            self._pending = None
            self._study = self._optuna.create_study(directions=self._directions, **self._options)
            for record in records:
                self._add(record)

    def ask(self) -> Any:
        """Return the next trial; see `Sampler`."""
        trial, self._pending = self._pending, None
        if trial is None:
            self._reported = set()
            trial = self._study.ask()
        return trial

    def distributions(self, trial: Any) -> dict[str, str]:
        """Return what a trial's parameters were drawn from, as Optuna's JSON."""
        to_json = self._optuna.distributions.distribution_to_json
        return {name: to_json(distribution) for name, distribution in trial.distributions.items()}

    def report(self, trial: Any, step: int, value: float) -> bool:
        """Report the objective and ask the study's pruner."""
        if step not in self._reported:  # a trial that goes on from a checkpoint may evaluate a step once more
            self._reported.add(step)
            trial.report(value, step)
        return trial.should_prune()

    def tell(self, trial: Any, record: TrialRecord) -> None:
        """Tell the study how a trial ended."""
        if record.state == "complete":
            self._study.tell(trial, record.values)
        else:
            self._study.tell(trial, state=self._state(record))

    def _draw_again(self, record: TrialRecord) -> bool:
        """Draw a trial of the journal once more; False if the values are others."""
        trial = self._study.ask()
        for name, text in record.distributions.items():
            _suggest(trial, name, self._optuna.distributions.json_to_distribution(text))
        if not same_values(trial.params, record.params):
            return False
        for step, value in record.reports.items():
            trial.report(value, step)
        if record.state == "running":
            self._pending, self._reported = trial, set(record.reports)
        else:
            self.tell(trial, record)
        return True

    def _add(self, record: TrialRecord) -> None:
        if record.state == "running":
            self._study.enqueue_trial(record.params)
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


def _suggest(trial: Any, name: str, drawn_from: Any) -> None:
    kind = type(drawn_from).__name__
    if kind == "CategoricalDistribution":
        trial.suggest_categorical(name, drawn_from.choices)
    else:
        suggest = trial.suggest_int if kind == "IntDistribution" else trial.suggest_float
        suggest(name, drawn_from.low, drawn_from.high, step=drawn_from.step, log=drawn_from.log)
