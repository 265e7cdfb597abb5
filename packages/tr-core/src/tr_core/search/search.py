"""Run the trials of a search one after the other, and choose the best one."""

from __future__ import annotations

import copy
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from tr_args import TrainingArguments
from tr_core.protocols import Collectives, Strategy
from tr_core.search.arguments import changed, converted, default_compute_objective, default_hp_space
from tr_core.search.trial import FixedTrial, Space, TrialPrunedError, TrialRecord
from tr_core.trainer_methods import TrainerMethods
from tr_log import formatting, get_logger

if TYPE_CHECKING:
    from tr_core.search.study import SearchStudy

logger = get_logger("tr_core.trainer")


class BestRun(NamedTuple):
    """The best trial of a search.

    Attributes:
        run_id: the trial's number as text; its files are in `run-<run_id>`.
        objective: its objective; a list with several objectives.
        hyperparameters: the trial's suggested values and the arguments that it set, with their types.
        run_summary: every trial of the search, as dicts.
    """

    run_id: str
    objective: float | list[float]
    hyperparameters: dict[str, Any]
    run_summary: Any = None


def choose_best(study: SearchStudy, args: TrainingArguments) -> BestRun | list[BestRun]:
    """Return the best trial of a study, the earliest of equal ones; a list with several directions.

    Raises:
        ValueError: no trial is complete.
    """
    records = study.records()
    if not any(record.state == "complete" for record in records):
        states = [record.state for record in records]
        counts = ", ".join(f"{states.count(state)} {state}" for state in sorted(set(states))) or "none was made"
        failures = [record.error for record in records if record.error]
        last = f"; the last failure is {failures[-1]}" if failures else ""
        raise ValueError(f"no trial of the search is complete ({counts}){last}; there is no best one")
    summary = [record.as_dict() for record in records]
    runs = [
        BestRun(
            str(record.number),
            record.values[0] if study.has_one_objective else record.values,
            {**record.params, **converted(args, record.arguments)},
            summary,
        )
        for record in study.best()
    ]
    return runs[0] if study.has_one_objective else runs


_MOST_SHOWN = 30
"""Trials in the table at the end of a search."""


def table_of_trials(records: Sequence[TrialRecord], directions: Sequence[str]) -> str:
    """Return a line for each trial, the best first, then those without an objective; a value in a column of its own."""

    def place(record: TrialRecord) -> tuple[bool, float]:
        if record.state != "complete":
            return True, record.number
        return False, record.values[0] * (-1 if directions[0] == "maximize" else 1)

    names = list(dict.fromkeys(name for record in records for name in record.hyperparameters))
    heads = ["objective"] if len(directions) == 1 else [f"objective {n}" for n in range(1, len(directions) + 1)]
    rows = [["run", "state", *heads, *names]]
    for record in sorted(records, key=place)[:_MOST_SHOWN]:
        values = record.values if record.state == "complete" else [None] * len(directions)
        cells = [*values, *(record.hyperparameters.get(name) for name in names)]
        rows.append(
            [f"run-{record.number}", record.state, *("" if cell is None else formatting.value(cell) for cell in cells)]
        )
    left_out = len(records) - _MOST_SHOWN
    return "".join(f"\n  {line}" for line in formatting.table(rows)) + (
        f"\n  and {left_out} more" if left_out > 0 else ""
    )


Outcome = TypeVar("Outcome")


def on_rank_zero(collectives: Collectives, decide: Callable[[], Outcome]) -> Outcome:
    """Return the result of `decide` on every rank; only rank 0 calls `decide`. Collective.

    Raises:
        Exception: the exception of `decide`; on the other ranks a RuntimeError that quotes it.
    """
    error: Exception | None = None
    outcome, text = None, None
    if collectives.rank == 0:
        try:
            outcome = decide()
        except Exception as caught:  # the other ranks must receive any exception, or they wait for ever
            error, text = caught, f"{type(caught).__name__}: {caught}"
    outcome, text = collectives.gather_objects((outcome, text))[0]
    if error is not None:
        raise error
    if text is not None:
        raise RuntimeError(f"rank 0 could not go on: {text}")
    return outcome  # type: ignore[return-value]


Objective = Callable[[dict[str, float]], Any]


@dataclass
class SearchPlan:
    """The plan of a search.

    Attributes:
        objective: turns the metrics of an evaluation into a number, or into one for each direction.
        n_trials: number of trials of the search, those of an earlier call included.
        name_of: returns the name of a trial; None for no names.
        timeout_s: seconds after which no further trial begins; None is no limit.
        catch: exceptions that end a trial but not the search.
    """

    space: Space
    objective: Objective
    directions: list[str]
    n_trials: int
    name_of: Callable[[Any], str] | None = None
    timeout_s: float | None = None
    catch: tuple[type[Exception], ...] = ()
    collect_garbage: bool = False

    @classmethod
    def from_options(
        cls,
        space: Space | None,
        objective: Objective | None,
        directions: list[str],
        n_trials: int,
        name_of: Callable[[Any], str] | None,
        options: dict[str, Any],
    ) -> SearchPlan:
        """Return the plan of a call; remove `catch`, `timeout` and `gc_after_trial` from its further options."""
        catch = options.pop("catch", ())
        return cls(
            space if space is not None else default_hp_space,
            objective if objective is not None else default_compute_objective,
            directions,
            n_trials,
            name_of,
            timeout_s=options.pop("timeout", None),
            catch=(catch,) if isinstance(catch, type) else tuple(catch),
            collect_garbage=bool(options.pop("gc_after_trial", False)),
        )


class Search:
    """One search with a Trainer.

    Rank 0 draws the trials, keeps them in a study and decides; every rank runs every trial.

    Args:
        backend: the user's name of a backend, or None.
        options: those of the backend.

    Attributes:
        record: the current trial, the same on all ranks.

    Raises:
        ImportError: Optuna is not installed.
    """

    def __init__(self, runner: TrainerMethods, plan: SearchPlan, backend: str | None, options: dict[str, Any]) -> None:
        self._pruned = (TrialPrunedError, _pruned_by_optuna())
        self._runner, self._plan, self._options = runner, plan, options
        self._is_default = backend is None
        self._backend = str(getattr(backend, "value", backend) or "random").lower()
        self._folder = Path(runner.args.output_dir)
        self._study: Any = None
        self._trial: Any = None
        self._begin_s = time.monotonic()
        self._callback_states = copy.deepcopy(runner.callback_handler.state_dict())
        self.record = TrialRecord(-1)
        self._values: list[float] | None = None

    def run(self, resume: bool) -> BestRun | list[BestRun]:
        """Run the missing trials and return the best of all."""
        self._folder = Path(on_rank_zero(self._strategy, lambda: self._open(resume)))
        while (following := on_rank_zero(self._strategy, self._draw)) is not None:
            self.record, goes_on = following
            self._make_run(goes_on)
        return on_rank_zero(self._strategy, self._choose_best)

    def _choose_best(self) -> BestRun | list[BestRun]:
        records = self._study.records()
        shown = table_of_trials(records, self._plan.directions)
        logger.info("the search in %s has %d trials%s", self._folder, len(records), shown)
        return choose_best(self._study, self._runner.args)

    def report(self, metrics: dict[str, float]) -> None:
        """Report an evaluation during training.

        Raises:
            TrialPrunedError: the trial is pruned.
        """
        self._values = self._objectives(metrics)
        if len(self._plan.directions) > 1:
            return
        step, value = self._runner.state.global_step, self._values[0]
        if on_rank_zero(self._strategy, lambda: self._study.report(self._trial, step, value)):
            raise TrialPrunedError(f"trial {self.record.number} is pruned at step {step} with {value}")

    @property
    def _strategy(self) -> Strategy:
        return self._runner.strategy

    def _open(self, resume: bool) -> str:
        """Begin a search, or resume the newest in the output folder; return its folder."""
        from tr_core.search.samplers import choose_backend
        from tr_core.search.study import SearchStudy, has_trials, newest_search

        plan, seed = self._plan, self._runner.args.seed
        backend = choose_backend(self._backend, self._is_default, plan.space, plan.n_trials, seed, self._options)
        folder, number = newest_search(self._folder)
        if not resume and has_trials(folder):
            earlier, folder = folder, self._folder / f"search-{number + 1}"
            logger.info(
                "%s holds an earlier search, which resume=True would resume; this one is a new one, in %s",
                earlier,
                folder,
            )
        self._study = SearchStudy(folder, backend, plan.directions, plan.space, resume)
        return str(folder)

    def _draw(self) -> tuple[TrialRecord, bool] | None:
        """Return the next trial, and whether it resumes an interrupted one; None at the end."""
        timeout_s = self._plan.timeout_s
        is_late = timeout_s is not None and time.monotonic() - self._begin_s >= timeout_s
        finished = [record for record in self._study.records() if record.state != "running"]
        if is_late or len(finished) >= self._plan.n_trials:
            return None
        self._trial = trial = self._study.ask()
        if trial is None:
            return None
        arguments = converted(self._runner.args, self._plan.space(trial))
        name = None if self._plan.name_of is None else self._plan.name_of(trial)
        goes_on = self._study.begin(trial, name, arguments)
        return TrialRecord(trial.number, name=name, params=dict(trial.params), arguments=arguments), goes_on

    def _make_run(self, goes_on: bool) -> None:
        record, runner = self.record, self._runner
        shown = ", ".join(f"{name}={value}" for name, value in record.hyperparameters.items())
        logger.info("trial %d of %d, in run-%d: %s", record.number + 1, self._plan.n_trials, record.number, shown)
        self._values = None
        try:
            with changed(runner.args, record.arguments, str(self._folder / f"run-{record.number}")), self._parts():
                saves = runner.args.save_strategy != "no" and not runner.args.save_only_model
                runner.train(resume_from_checkpoint="auto" if goes_on and saves else None, trial=self._trial_of_run())
                if self._values is None:
                    self._values = self._objectives(runner.evaluate())
            state, error = ("complete", None) if _are_numbers(self._values) else ("failed", "an objective is NaN")
        except self._pruned:
            state, error = "pruned", None
        except self._plan.catch as caught:
            state, error = "failed", f"{type(caught).__name__}: {caught}"
        on_rank_zero(self._strategy, lambda: self._end(state, error))
        if self._plan.collect_garbage:
            gc.collect()

    def _trial_of_run(self) -> Any:
        """Return what a model_init is given: one process may ask for more values, which Optuna draws."""
        if self._strategy.world_size > 1:
            return FixedTrial(self.record.number, self.record.params, "with several processes")
        if self._backend == "grid":
            return FixedTrial(self.record.number, self.record.params, "for a grid")
        return self._trial

    def _end(self, state: str, error: str | None) -> None:
        values = list(self._values or ())
        self._study.tell(self._trial, state, values, error)
        logger.info("run-%d is %s: %s", self.record.number, state, error or ", ".join(map(formatting.value, values)))

    def _objectives(self, metrics: dict[str, float]) -> list[float]:
        result = self._plan.objective(dict(metrics))
        values = list(result) if isinstance(result, Sequence) and not isinstance(result, str) else [result]
        if len(values) != len(self._plan.directions):
            raise ValueError(
                f"compute_objective returned {len(values)} values, {result!r}, for {len(self._plan.directions)} "
                f"directions, {self._plan.directions}; they must be as many"
            )
        try:
            return [float(value) for value in values]
        except (TypeError, ValueError):
            raise ValueError(f"compute_objective returned {result!r}; it must return a number") from None

    @contextmanager
    def _parts(self) -> Iterator[None]:
        """Start a run with a new model, callbacks as before the search, and its own checkpointer."""
        runner = self._runner
        runner.callback_handler.load_state_dict(copy.deepcopy(self._callback_states))
        before = runner.exchange_checkpointer(None)
        runner.forget_model()
        try:
            yield
        finally:
            own = runner.exchange_checkpointer(before)
            if own is not None:
                own.close()


def _pruned_by_optuna() -> type[Exception]:
    """Return the exception by which Optuna prunes a trial.

    Raises:
        ImportError: Optuna is not installed.
    """
    try:
        import optuna
    except ImportError:
        raise ImportError("hyperparameter_search needs optuna; pip install 'tr-core[optuna]'") from None
    return optuna.TrialPruned


def _are_numbers(values: Sequence[float]) -> bool:
    return all(value == value for value in values)  # NaN alone differs from itself
