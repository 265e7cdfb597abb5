"""Search for hyper-parameters in a method of the Trainer: one run for each trial."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from tr_core.model import is_left_in_place
from tr_core.preflight.requested import stop_if_requested
from tr_core.protocols import Checkpointer
from tr_core.search.arguments import check_search
from tr_core.search.samplers import make_sampler
from tr_core.search.search import BestRun, Search, SearchPlan
from tr_core.trainer.hooks import Hooks


class Searching(Hooks):
    """Run the trials of a search."""

    search: Search | None = None

    def hyperparameter_search(
        self,
        hp_space: Callable[[Any], dict[str, Any]] | None = None,
        compute_objective: Callable[[dict[str, float]], float | Sequence[float]] | None = None,
        n_trials: int = 20,
        direction: str | list[str] = "minimize",
        backend: str | None = None,
        hp_name: Callable[[Any], str] | None = None,
        *,
        resume: bool = False,
        **kwargs: Any,
    ) -> BestRun | list[BestRun]:
        """Train once for every trial, and return the best by its last evaluation in training.

        Every trial has a new model from `model_init`, and its own folder `run-<number>` in `output_dir`. If training
        runs no evaluation, one runs at its end. Afterwards the arguments are restored, and the model is that of the
        last trial. To get the best model, set `best.hyperparameters` and train. The search appends its trials to
        `trials.jsonl` line by line. Another search in the same `output_dir` has its own folder in it, `search-2` and
        so on.

        With several processes rank 0 draws the trials, and all ranks run each trial together.

        Args:
            hp_space: `(trial)` → dict of training arguments, from `trial.suggest_float`, `suggest_int` and
                `suggest_categorical`. Values are converted to the arguments' types. By default learning rate, epochs,
                seed and batch size.
            compute_objective: `(metrics)` → number, or one for each direction. By default the evaluation loss, or the
                sum of the other metrics if there are any.
            n_trials: trials of the search, including those of an earlier call.
            direction: `minimize` or `maximize`, or a list for several objectives.
            backend: `random`, the default, and `grid` need no package; `optuna` adds samplers that learn from earlier
                trials, and pruning. An installed package is never selected by itself.
            hp_name: `(trial)` → name of the trial, for `state.trial_name`.
            resume: resume the newest search in `output_dir`, if there is one. Finished trials do not run again, and an
                interrupted trial resumes from its newest checkpoint.
            **kwargs: for every backend `timeout` (seconds after which no trial begins), `catch` (exceptions that fail a
                trial and not the search) and `gc_after_trial`. For `random` the `seed` (by default that of the
                arguments). For `grid` the number of `points` in a range without steps. For `optuna` the arguments of
                `optuna.create_study`, as `sampler` and `pruner`.

        Returns:
            The best trial. With several directions: all trials that no other trial beats. The same on every rank.

        Raises:
            ValueError: something needed is missing or wrong; raised before the first run if possible.
            ImportError: the backend's library is not installed.
        """
        directions = [direction] if isinstance(direction, str) else list(direction)
        self._check_search(directions, n_trials)
        stop_if_requested(self, trains=True)
        plan = SearchPlan.from_options(hp_space, compute_objective, directions, n_trials, hp_name, kwargs)
        seed = self.args.seed
        make = partial(make_sampler, backend, plan.space, directions, n_trials, seed, kwargs)
        self.search = Search(self, plan, make)
        try:
            return self.search.run(resume)
        finally:
            self.search = None

    def _check_search(self, directions: list[str], n_trials: int) -> None:
        check_search(
            self.args,
            directions,
            n_trials,
            has_model_init=self.model_init is not None,
            has_eval_data=self.eval_dataset is not None or self.overrides("get_eval_dataloader"),
            has_own_checkpointer=self.has_own_checkpointer,
        )

    def report_trial(self, metrics: dict[str, float]) -> None:
        """Report the metrics of an evaluation during training to the search, if any.

        Raises:
            tr_core.search.TrialPrunedError: the search ends the trial here.
        """
        if self.search is not None and self.trial is not None:
            self.search.report(metrics)

    def _report_to_hp_search(self, trial: Any, step: int, metrics: dict[str, float]) -> None:
        """Report the metrics of an evaluation to a search; without one do nothing."""
        self.report_trial(metrics)

    def trial_state(self) -> dict[str, Any]:
        """Return the state's fields about the trial of a run; empty outside of a search."""
        if self.trial is None:
            return {}
        name, params = None, self.trial if isinstance(self.trial, Mapping) else getattr(self.trial, "params", {})
        if self.search is not None:
            name, params = self.search.record.name, self.search.record.hyperparameters
        return {"is_hyper_param_search": True, "trial_name": name, "trial_params": dict(params)}

    def forget_model(self) -> None:
        """Free the device memory of the model and its optimizer; the next run builds a new model.

        Without this, memory would hold the weights of two trials and the moments of the earlier one at once.
        """
        self._model_is_fresh = False
        self._set("optimizer", self.chosen.optimizer)
        self._set("lr_scheduler", self.chosen.schedule)
        if self._is_prepared and self.strategy.device.type != "cpu" and not is_left_in_place(self.model):
            self.model_wrapped, self._prepared = self.model.to("cpu"), None

    def current_checkpointer(self) -> Checkpointer | None:
        """Return the checkpointer, if one was passed or built already."""
        return self._checkpointer

    def exchange_checkpointer(self, checkpointer: Checkpointer | None) -> Checkpointer | None:
        """Replace the checkpointer and return the old one; None builds one later from the arguments."""
        before, self._checkpointer = self._checkpointer, checkpointer
        self._checkpointer_made_of = None
        return before
