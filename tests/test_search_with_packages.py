"""Searches with checkpoints, with Optuna, and in several processes."""

import optuna
import pytest
import torch
from shared.data import rows
from shared.models import Classifier

from tr_core import Trainer, TrainerCallback, TrainingArguments
from tr_dist.testing import run_ranks

optuna.logging.set_verbosity(optuna.logging.ERROR)


class Interrupted(BaseException):
    """As Ctrl-C."""


class InterruptAt(TrainerCallback):
    def __init__(self, trial, step):
        self.trial, self.step = trial, step

    def on_step_begin(self, args, state, control, **kwargs):
        if (state.trial_name, state.global_step) == (str(self.trial), self.step):
            raise Interrupted


class StepCounter(TrainerCallback):
    """Notes the trial of every step that is made."""

    def __init__(self):
        self.steps = []

    def on_step_end(self, args, state, control, **kwargs):
        self.steps.append((state.trial_name, state.global_step))


def make_trainer(folder, callbacks=(), model_init=lambda: Classifier(), **changes):
    options = {
        "per_device_train_batch_size": 4,
        "num_train_epochs": 2,
        "learning_rate": 1e-2,
        "eval_strategy": "epoch",
        "save_strategy": "no",
        "disable_tqdm": True,
        "log_level": "error",
        "use_cpu": True,
    }
    args = TrainingArguments(output_dir=str(folder), **{**options, **changes})
    return Trainer(
        args=args, model_init=model_init, train_dataset=rows(24), eval_dataset=rows(9, 1), callbacks=list(callbacks)
    )


def space(trial):
    return {
        "learning_rate": trial.suggest_float("learning_rate", 1e-4, 1e-1, log=True),
        "optim": trial.suggest_categorical("optim", ["sgd", "adamw_torch"]),
    }


def name(trial):
    return str(trial.number)


def trials(folder):
    """Read the trials of a search as any program that knows Optuna does."""
    backend = optuna.storages.journal.JournalFileBackend(str(folder / "study.journal"))
    return optuna.load_study(study_name="search", storage=optuna.storages.JournalStorage(backend)).trials


# Checkpoints


@pytest.mark.parametrize("backend", ["random", "optuna"])
@pytest.mark.parametrize("step", [7, *(pytest.param(step, marks=pytest.mark.slow) for step in (5, 11))])
def test_a_trial_that_was_interrupted_goes_on_from_its_checkpoint(tmp_path, backend, step):
    def options():
        sampler = {"sampler": optuna.samplers.TPESampler(seed=1)} if backend == "optuna" else {}
        return {"n_trials": 3, "backend": backend, "hp_name": name, **sampler}

    saving = {"save_strategy": "steps", "save_steps": 2}
    alone = make_trainer(tmp_path / "alone", **saving).hyperparameter_search(space, **options())
    with pytest.raises(Interrupted):
        make_trainer(tmp_path / "cut", [InterruptAt(1, step)], **saving).hyperparameter_search(space, **options())
    counter = StepCounter()
    resumed = make_trainer(tmp_path / "cut", [counter], **saving).hyperparameter_search(space, resume=True, **options())
    same = 3 if backend == "random" else 2  # Optuna's sampler draws other values for the trials after a resume
    assert resumed.run_summary[:same] == alone.run_summary[:same]
    assert counter.steps[0] == ("1", step // 2 * 2 + 1)
    assert {trial for trial, _ in counter.steps} == {"1", "2"}
    assert (tmp_path / "cut" / "run-2" / "checkpoint-12").is_dir()


def test_a_trial_that_was_interrupted_after_its_last_checkpoint_is_only_evaluated(tmp_path):
    def interrupted(metrics):
        if len(seen) == 3:  # the second trial's last evaluation
            raise Interrupted
        seen.append(metrics["eval_loss"])
        return metrics["eval_loss"]

    seen = []
    saving = {"save_strategy": "steps", "save_steps": 12, "eval_strategy": "no"}
    alone = make_trainer(tmp_path / "alone", **saving).hyperparameter_search(space, n_trials=2)
    seen = [0, 0]
    with pytest.raises(Interrupted):
        make_trainer(tmp_path / "cut", **saving).hyperparameter_search(space, interrupted, n_trials=2)
    counter = StepCounter()
    resumed = make_trainer(tmp_path / "cut", [counter], **saving).hyperparameter_search(space, n_trials=2, resume=True)
    assert resumed == alone
    assert counter.steps == []


def test_without_optimizer_states_an_interrupted_trial_begins_again(tmp_path):
    saving = {"save_strategy": "steps", "save_steps": 2, "save_only_model": True}
    alone = make_trainer(tmp_path / "alone", **saving).hyperparameter_search(space, n_trials=2, hp_name=name)
    with pytest.raises(Interrupted):
        make_trainer(tmp_path / "cut", [InterruptAt(1, 5)], **saving).hyperparameter_search(
            space, n_trials=2, hp_name=name
        )
    resumed = make_trainer(tmp_path / "cut", **saving).hyperparameter_search(
        space, n_trials=2, hp_name=name, resume=True
    )
    assert resumed == alone


# Optuna


def study_options(**more):
    return {"backend": "optuna", "sampler": optuna.samplers.TPESampler(seed=3), "n_trials": 12, **more}


def test_a_search_with_a_seed_keeps_its_finished_trials_and_repeats_no_draw(tmp_path):
    def objective(metrics):
        calls.append(1)
        if len(calls) == 7:
            raise Interrupted
        return metrics["eval_loss"]

    def options():
        return study_options(sampler=optuna.samplers.RandomSampler(seed=3), n_trials=8)

    calls = []
    with pytest.raises(Interrupted):
        make_trainer(tmp_path).hyperparameter_search(space, objective, **options())
    kept = {trial.number: trial.values for trial in trials(tmp_path) if trial.state.name == "COMPLETE"}
    best = make_trainer(tmp_path).hyperparameter_search(space, resume=True, **options())
    assert kept
    assert {number: best.run_summary[number]["values"] for number in kept} == kept
    drawn = [tuple(trial["params"].values()) for trial in best.run_summary]
    assert len(set(drawn)) == len(drawn) == 8


def test_a_search_without_a_seed_keeps_its_finished_trials(tmp_path):
    def interrupting(metrics):
        calls.append(1)
        if len(calls) == 6:
            raise Interrupted
        return metrics["eval_loss"]

    calls = []
    with pytest.raises(Interrupted):
        make_trainer(tmp_path).hyperparameter_search(space, interrupting, backend="optuna", n_trials=5)
    kept = {trial.number: trial.values for trial in trials(tmp_path) if trial.state.name == "COMPLETE"}
    begun = {trial.number: trial.params for trial in trials(tmp_path) if trial.state.name == "RUNNING"}
    best = make_trainer(tmp_path).hyperparameter_search(space, backend="optuna", n_trials=5, resume=True)
    assert [trial["number"] for trial in best.run_summary] == list(range(5))
    assert {number: best.run_summary[number]["values"] for number in kept} == kept
    assert best.run_summary[len(kept)]["params"] == begun[len(kept)]  # the interrupted one, with its values


def test_a_study_in_a_storage_is_gone_on_with(tmp_path):
    storage = f"sqlite:///{tmp_path}/study.db"
    options = {"storage": storage, "study_name": "mine", "load_if_exists": True}
    make_trainer(tmp_path / "out").hyperparameter_search(space, **study_options(n_trials=2, **options))
    best = make_trainer(tmp_path / "out").hyperparameter_search(
        space, resume=True, **study_options(n_trials=4, **options)
    )
    study = optuna.load_study(study_name="mine", storage=storage)
    assert len(study.trials) == 4
    assert study.best_value == best.objective
    assert str(study.best_trial.number) == best.run_id


def test_processes_with_one_storage_have_trials_of_their_own(tmp_path):
    options = {"storage": f"sqlite:///{tmp_path}/study.db", "study_name": "mine", "load_if_exists": True}
    for folder in ("first", "second"):
        found = make_trainer(tmp_path / folder).hyperparameter_search(space, **study_options(n_trials=2, **options))
        assert len(found.run_summary) == 2
    study = optuna.load_study(study_name="mine", storage=options["storage"])
    assert (len(study.trials), str(study.best_trial.number)) == (4, found.run_id)
    again = make_trainer(tmp_path / "first").hyperparameter_search(
        space, resume=True, **study_options(n_trials=3, **options)
    )
    assert [trial["number"] for trial in again.run_summary] == [0, 1, 4]
    with pytest.raises(ValueError, match=r"the study 'mine' is of another search: .*'minimize'.*, not .*'maximize'"):
        make_trainer(tmp_path / "third").hyperparameter_search(
            space, direction="maximize", **study_options(n_trials=1, **options)
        )


def test_a_sampler_that_knows_its_last_trial_ends_the_search(tmp_path):
    sampler = optuna.samplers.GridSampler({"learning_rate": [0.01, 0.1], "optim": ["sgd"]})
    best = make_trainer(tmp_path).hyperparameter_search(space, **study_options(sampler=sampler))
    assert sorted(trial["params"]["learning_rate"] for trial in best.run_summary) == [0.01, 0.1]


def test_optunas_own_exception_prunes_a_trial(tmp_path):
    class Pruning(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.trial_name == "1":
                raise optuna.TrialPruned

    best = make_trainer(tmp_path, [Pruning()]).hyperparameter_search(space, hp_name=name, **study_options(n_trials=3))
    assert [trial["state"] for trial in best.run_summary] == ["complete", "pruned", "complete"]


def test_failed_trials_are_told_to_the_study(tmp_path):
    def objective(metrics):
        calls.append(1)
        if len(calls) == 3:
            raise ArithmeticError("no")
        return float("nan") if len(calls) in (4, 5) else metrics["eval_loss"]

    calls = []
    best = make_trainer(tmp_path).hyperparameter_search(
        space, objective, **study_options(n_trials=4, catch=ArithmeticError)
    )
    assert [trial["state"] for trial in best.run_summary] == ["complete", "failed", "failed", "complete"]
    again = make_trainer(tmp_path).hyperparameter_search(space, resume=True, **study_options(n_trials=4))
    assert again[:3] == best[:3]  # NaN, in the summary, equals nothing
    assert [trial["state"] for trial in again.run_summary] == [trial["state"] for trial in best.run_summary]


def test_several_jobs_in_one_process_are_refused(tmp_path):
    with pytest.raises(ValueError, match="n_jobs must be 1: one Trainer makes one run at a time"):
        make_trainer(tmp_path).hyperparameter_search(space, **study_options(n_jobs=2))


# Several processes


def search(folder, backend):
    """Run in every rank; returns what the test compares."""

    def sized(trial):
        return Classifier(16 if trial is None else trial.params["width"])

    def wide(trial):
        trial.suggest_int("width", 4, 8)
        return space(trial)

    pruner = optuna.pruners.ThresholdPruner(upper=1.13)
    given = {"sampler": optuna.samplers.TPESampler(seed=2), "pruner": pruner}
    counter = StepCounter()
    trainer = make_trainer(folder, [counter], sized)
    best = trainer.hyperparameter_search(
        wide, n_trials=5, backend=backend, hp_name=name, **(given if backend == "optuna" else {})
    )
    weights = [parameter.detach().clone() for parameter in trainer.model.parameters()]
    result = best, counter.steps, trainer.state.trial_params, weights
    trainer.strategy.close()
    return result


def refused(folder):
    """Run in every rank; returns the error."""
    trainer = make_trainer(folder)
    try:
        trainer.hyperparameter_search(lambda trial: {"lerning_rate": 1.0}, n_trials=2)
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        trainer.strategy.close()


@pytest.mark.parametrize("backend", ["random", "optuna"])
def test_all_ranks_make_the_trials_of_rank_0(tmp_path, backend):
    first, second = run_ranks(search, 2, str(tmp_path / "out"), backend, timeout_s=120)
    assert first[0] == second[0]
    assert first[1] == second[1]
    assert first[2] == second[2]
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(first[3], second[3], strict=True))
    states = [trial["state"] for trial in first[0].run_summary]
    assert len(states) == 5
    assert ("pruned" in states) == (backend == "optuna")
    assert len(trials(tmp_path / "out")) == 5


def test_an_error_in_the_space_is_one_of_all_ranks(tmp_path):
    first, second = run_ranks(refused, 2, str(tmp_path))
    assert first == "ValueError: hp_space: unknown argument lerning_rate; did you mean learning_rate?"
    assert second == f"RuntimeError: rank 0 could not go on: {first}"
