"""Keep the trials of a search in an Optuna study, so that an interrupted search can resume."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import optuna
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock
from optuna.trial import TrialState

from tr_core.search.samplers import Backend
from tr_core.search.trial import Space, TrialRecord
from tr_log.formatting import to_strict

FILE_NAME = "study.journal"
FORMER_NAME = "trials.jsonl"
_STATES = {
    TrialState.RUNNING: "running",
    TrialState.COMPLETE: "complete",
    TrialState.PRUNED: "pruned",
    TrialState.FAIL: "failed",
}


class SearchStudy:
    """The study of a search, on rank 0.

    Its storage is Optuna's journal in the search's folder, or a storage of the user's. A trial's user attributes hold
    what Optuna does not know: the training arguments that it set, its name, the folder of its search, its error.

    Args:
        folder: that of the search.
        resume: whether to go on with the study in the folder; otherwise a new one replaces one without trials.

    Attributes:
        has_one_objective: whether there is one direction.

    Raises:
        ValueError: the folder holds another search, or its file cannot be read.
    """

    def __init__(self, folder: Path, backend: Backend, directions: Sequence[str], space: Space, resume: bool) -> None:
        self._folder, self._backend = folder, backend
        self._has_own_file = backend.options.get("storage") is None
        self._study = self._open(list(directions), resume)
        self.has_one_objective = len(directions) == 1
        self._is_exhausted = False
        self._interrupted = [trial for trial in self._trials() if trial.state is TrialState.RUNNING]
        if backend.settings["backend"] == "optuna":
            if self._trials():
                self._study.sampler.reseed_rng()  # with its seed it would repeat its draws
        else:
            self._check_space(space)
        for point in (backend.grid or [])[len(self._study.trials) :]:
            self._study.enqueue_trial(point)

    def records(self) -> list[TrialRecord]:
        """Return the trials of this search that began, by number."""
        return [_record(trial) for trial in self._trials()]

    def best(self) -> list[TrialRecord]:
        """Return the complete trials of the study that no other beats; one, the earliest, with one direction.

        Raises:
            ValueError: no trial is complete.
        """
        if self.has_one_objective:
            return [_record(self._study.best_trial)]
        return [_record(trial) for trial in self._study.best_trials]

    def ask(self) -> Any:
        """Return the next trial, an interrupted one first; None if there is none."""
        if self._interrupted:
            return optuna.Trial(self._study, self._interrupted.pop(0)._trial_id)
        waits = self._backend.grid is None or self._study.get_trials(deepcopy=False, states=(TrialState.WAITING,))
        return self._study.ask() if waits and not self._is_exhausted else None

    def begin(self, trial: Any, name: str | None, arguments: dict[str, Any]) -> bool:
        """Record what a trial sets, and return whether an interrupted run of it set the same."""
        arguments = to_strict(arguments)
        earlier = trial.user_attrs.get("arguments")
        trial.set_user_attr("name", name)
        trial.set_user_attr("folder", str(self._folder.resolve()))
        trial.set_user_attr("arguments", arguments)
        return earlier == arguments

    def report(self, trial: Any, step: int, value: float) -> bool:
        """Record the objective at a step, and return whether to prune the trial."""
        # A trial that goes on from a checkpoint may evaluate a step again.
        if step not in self._study.get_trials(deepcopy=False)[trial.number].intermediate_values:
            trial.report(value, step)
        return trial.should_prune()

    def tell(self, trial: Any, state: str, values: list[float], error: str | None) -> None:
        """Record how a trial ended."""
        if error is not None:
            trial.set_user_attr("error", error)
        [ended] = [known for known, text in _STATES.items() if text == state]
        try:
            self._study.tell(trial, values if ended is TrialState.COMPLETE else None, ended)
        except RuntimeError:
            # Samplers that know their last trial stop the study after it, which outside of `optimize` is an error.
            if self._study.get_trials(deepcopy=False)[trial.number].state is TrialState.RUNNING:
                raise
            self._is_exhausted = True

    def _trials(self) -> list[Any]:
        trials = self._study.get_trials(deepcopy=False, states=tuple(_STATES))
        if self._has_own_file:
            return trials
        return [trial for trial in trials if trial.user_attrs.get("folder") == str(self._folder.resolve())]

    def _open(self, directions: list[Any], resume: bool) -> Any:
        options = dict(self._backend.options)
        path = self._folder / FILE_NAME
        if self._has_own_file:
            options["storage"] = _journal(path, resume)
            options.setdefault("study_name", "search")
            options["load_if_exists"] = True
            earlier = optuna.get_all_study_names(options["storage"])
            if earlier not in ([], [options["study_name"]]):
                raise _another(path, earlier, options["study_name"])
        verbosity = optuna.logging.get_verbosity()
        optuna.logging.set_verbosity(max(verbosity, optuna.logging.WARNING))  # or it names a study that nobody named
        try:
            study: Any = optuna.create_study(directions=directions, **options)
        finally:
            optuna.logging.set_verbosity(verbosity)
        wanted = {**self._backend.settings, "directions": directions}
        theirs = [direction.name.lower() for direction in study.directions]
        saved = {**study.user_attrs.get("search", self._backend.settings), "directions": theirs}
        if saved != wanted:
            raise _another(path if self._has_own_file else f"the study {study.study_name!r}", saved, wanted)
        study.set_user_attr("search", wanted)
        return study

    def _check_space(self, space: Space) -> None:
        """Raise where a search space is another than that of the trials that began."""
        for trial in self._trials():
            if "arguments" not in trial.user_attrs:  # interrupted in the space
                continue
            again = optuna.trial.FixedTrial(trial.params, trial.number)
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # of values that the space no longer has
                    space(again)
                now: Any = again.distributions
            except ValueError as error:
                now = error
            # A model_init may have requested more.
            if now != {name: trial.distributions.get(name) for name in again.distributions}:
                raise ValueError(
                    f"trial {trial.number} of the earlier search was made with {trial.distributions}, and hp_space "
                    f"now gives {now}; resume with the same space, which must depend on the trial alone"
                )


def newest_search(output_dir: Path) -> tuple[Path, int]:
    """Return folder and number of the newest search in an output folder; the first search uses the folder itself."""
    searches = [path for path in output_dir.glob("search-*") if has_trials(path)]
    numbers = (path.name.removeprefix("search-") for path in searches)
    number = max((int(text) for text in numbers if text.isdecimal()), default=1)
    return (output_dir if number == 1 else output_dir / f"search-{number}"), number


def has_trials(folder: Path) -> bool:
    """Whether a trial began in the folder of a search."""
    path = folder / FILE_NAME
    if (folder / FORMER_NAME).exists() or any(folder.glob("run-[0-9]*")):
        return True
    return path.exists() and b'"arguments"' in path.read_bytes()


def _journal(path: Path, resume: bool) -> Any:
    """Return the storage in a file.

    Raises:
        ValueError: the file is not a journal of Optuna's.
    """
    if not resume:
        path.unlink(missing_ok=True)
    elif path.exists():
        _cut_half_line(path)
    elif (former := path.with_name(FORMER_NAME)).exists():
        raise ValueError(
            f"{former} is the journal of a search by an earlier version, which is no longer read; leave resume=True "
            "out for a new search, or finish this one with that version"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    backend = JournalFileBackend(str(path), JournalFileOpenLock(str(path)))
    try:
        return _JournalOfPlainChoices(backend)
    except Exception as error:  # whatever Optuna finds in a file that it did not write
        raise ValueError(
            f"{path} is not a journal of a search ({type(error).__name__}: {error}); restore it, or remove it"
        ) from None


class _JournalOfPlainChoices(JournalStorage):
    """Optuna's journal, which refuses choices that its file cannot hold before it writes to it."""

    def set_trial_param(self, trial_id: int, param_name: str, param_value_internal: float, distribution: Any) -> None:
        choices = getattr(distribution, "choices", ())
        odd = next((choice for choice in choices if not isinstance(choice, bool | int | float | str | None)), None)
        if odd is not None:
            raise ValueError(
                f"suggest_categorical({param_name!r}, ...) has {odd!r} among its choices, which {FILE_NAME} cannot "
                "hold; choices are None, bool, numbers and text: give names, and build from them in model_init"
            )
        super().set_trial_param(trial_id, param_name, param_value_internal, distribution)


def _cut_half_line(path: Path) -> None:
    """Remove half a line that a crash left at the end of a file, to which Optuna would append."""
    content = path.read_bytes()
    os.truncate(path, content.rfind(b"\n") + 1)


def _another(place: Path | str, saved: Any, wanted: Any) -> ValueError:
    return ValueError(
        f"{place} is of another search: {saved}, not {wanted}; give the same, or leave resume=True out for a new one"
    )


def _record(trial: Any) -> TrialRecord:
    to_json = optuna.distributions.distribution_to_json
    return TrialRecord(
        number=trial.number,
        state=_STATES[trial.state],
        name=trial.user_attrs.get("name"),
        params=dict(trial.params),
        arguments=trial.user_attrs.get("arguments", {}),
        values=list(trial.values or ()),
        reports=dict(trial.intermediate_values),
        distributions={name: to_json(distribution) for name, distribution in trial.distributions.items()},
        error=trial.user_attrs.get("error"),
    )
