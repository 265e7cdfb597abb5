"""Search with Optuna: its samplers, its pruners, several objectives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tr_core.search.journal import TrialRecord


class OptunaSampler:
    """Trials of an Optuna study.

    An interrupted search resumes from its journal: its finished trials are added to a new study. As with Optuna's own
    storages, the sampler's generator is not saved. It is seeded again, so that no draw repeats.

    Args:
        directions: `minimize` or `maximize`, for each objective.
        options: arguments of `optuna.create_study`. With a `storage`, Optuna resumes the study in it.

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
