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
from tr_core.trainer.parts import TrainerParts


class Searching(TrainerParts):
    """What makes the runs of a search.

    Attributes:
        trial: the trial whose run this is; None outside of a search.
        search: the search under way, if any.
    """

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
        """Train once for every trial and return the best, by what its last evaluation in training gives.

        Every trial has a new model, of `model_init`, and its own folder, `run-<number>` in `output_dir`; where no
        evaluation is made in training, one is made at its end. Afterwards the arguments are as they were, and the model
        is that of the last trial: set `best.hyperparameters` and train to have the best one. The trials are kept in
        `trials.jsonl`, line by line as they come. A further search in the same `output_dir` has a folder of its own in
        it, `search-2` and so on.

        With several processes rank 0 draws the trials and all ranks make their runs together.

        Args:
            hp_space: `(trial)` → dict of training arguments, of what `trial.suggest_float`, `suggest_int` and
                `suggest_categorical` give; values are converted to the arguments' types. By default learning rate,
                epochs, seed and batch size.
            compute_objective: `(metrics)` → number, or one for each direction. By default the evaluation loss, or the
                sum of the other metrics if there are any.
            n_trials: trials of the search, those of an earlier call included.
            direction: `minimize` or `maximize`, or a list for several objectives.
            backend: `random`, the default, and `grid` need no package; `optuna` adds samplers that learn from earlier
                trials, and pruning. It is never chosen because it is installed.
            hp_name: `(trial)` → name of the trial, for `state.trial_name`.
            resume: go on with the newest search in `output_dir`, if there is one: finished trials are not made again,
                and one that was interrupted goes on from its newest checkpoint.
            **kwargs: for every backend `timeout` (seconds after which no trial begins), `catch` (exceptions that fail a
                trial and not the search) and `gc_after_trial`; for `random` the `seed` (by default that of the
                arguments); for `grid` the number of `points` in a range without steps; for `optuna` the arguments of
                `optuna.create_study`, as `sampler` and `pruner`.

        Returns:
            The best trial, or with several directions all that no other one beats, the same on every rank.

        Raises:
            ValueError: something needed is missing or wrong; before the first run, if that can be known.
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
        """Tell the search, if there is one, what an evaluation during training gave.

        Raises:
            tr_core.search.TrialPrunedError: the trial is to end here.
        """
        if self.search is not None and self.trial is not None:
            self.search.report(metrics)

    def trial_state(self) -> dict[str, Any]:
        """Return what the state of a run says of its trial; nothing outside of a search."""
        if self.trial is None:
            return {}
        name, params = None, self.trial if isinstance(self.trial, Mapping) else getattr(self.trial, "params", {})
        if self.search is not None:
            name, params = self.search.record.name, self.search.record.hyperparameters
        return {"is_hyper_param_search": True, "trial_name": name, "trial_params": dict(params)}

    def forget_model(self) -> None:
        """Have the next run begin with a new model, and free the device of this one and of its optimizer.

        Without that the weights of two trials, and the moments of the earlier one, would be there at once.
        """
        self._model_is_fresh = False
        self._set("optimizer", self.chosen.optimizer)
        self._set("lr_scheduler", self.chosen.schedule)
        if self._is_prepared and self.strategy.device.type != "cpu" and not is_left_in_place(self.model):
            self.model_wrapped, self._prepared = self.model.to("cpu"), None

    def current_checkpointer(self) -> Checkpointer | None:
        """Return where checkpoints go, if that was given or built already."""
        return self._checkpointer

    def exchange_checkpointer(self, checkpointer: Checkpointer | None) -> Checkpointer | None:
        """Use another checkpointer, None for one of the arguments as they are then, and return that of before."""
        before, self._checkpointer = self._checkpointer, checkpointer
        self._checkpointer_made_of = None
        return before
