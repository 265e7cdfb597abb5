"""A search makes one run a trial, keeps what it found, and resumes where it stopped."""

import sys
from types import SimpleNamespace

import pytest
import torch
from support.data import samples
from support.models import Classifier

from tr_args.testing import Later, facts
from tr_core import Trainer, TrainerCallback, TrainingArguments
from tr_core.search import BestRun, TrialPrunedError, default_compute_objective
from tr_core.search.search import on_rank_zero, table_of_trials
from tr_core.search.trial import TrialRecord

optuna = pytest.importorskip("optuna", reason="a search needs optuna")
optuna.logging.set_verbosity(optuna.logging.WARNING)


def space(trial):
    return {
        "learning_rate": trial.suggest_float("learning_rate", 1e-4, 1e-1, log=True),
        "num_train_epochs": trial.suggest_int("num_train_epochs", 1, 3),
    }


@pytest.fixture
def make_search(make_trainer):
    """Build a Trainer that can search; `search` is `hyperparameter_search` with a small space."""

    def build(**changes):
        options = {"model_init": Classifier, "eval_dataset": samples(8, 1), "eval_strategy": "epoch"}
        return make_trainer(**{**options, **changes})

    return build


def study(folder):
    """Read the study of a search as any program that knows Optuna does."""
    backend = optuna.storages.journal.JournalFileBackend(str(folder / "study.journal"))
    return optuna.load_study(study_name="search", storage=optuna.storages.JournalStorage(backend))


class Recorder(TrainerCallback):
    """Notes what every run begins with."""

    def __init__(self):
        self.runs = []

    def on_train_begin(self, args, state, control, **kwargs):
        weights = kwargs["model"].layers[0].weight.detach().clone()
        self.runs.append({"args": args.to_dict(), "weights": weights, "state": state.state_dict()})


@pytest.mark.parametrize(("direction", "choose"), [("minimize", min), ("maximize", max)])
def test_every_trial_is_a_run_with_its_arguments_and_the_best_is_found(make_search, direction, choose):
    recorder = Recorder()
    trainer = make_search(callbacks=[recorder])  # whose model_init has an option of its own, which is not a trial
    best = trainer.hyperparameter_search(space, n_trials=5, direction=direction)
    assert isinstance(best, BestRun)
    assert [run["args"]["learning_rate"] for run in recorder.runs] == [
        trial["arguments"]["learning_rate"] for trial in best.run_summary
    ]
    values = [trial["values"][0] for trial in best.run_summary]
    assert best.objective == choose(values)
    assert best.run_id == str(values.index(choose(values)))
    assert best.hyperparameters == best.run_summary[int(best.run_id)]["arguments"]
    assert len({run["args"]["learning_rate"] for run in recorder.runs}) == 5


def test_it_ends_with_a_table_of_all_trials_the_best_first(make_search, caplog):
    def model(trial):
        if trial is not None and trial.number == 1:
            raise ArithmeticError("too hard")
        if trial is not None:
            trial.suggest_categorical("width", [3])
        return Classifier()

    with caplog.at_level("INFO", "tr_core.trainer"):
        best = make_search(model_init=model).hyperparameter_search(
            space, n_trials=4, direction="maximize", catch=ArithmeticError
        )
    head, columns, first, *others = caplog.messages[-1].splitlines()
    assert head.endswith("has 4 trials")
    assert columns.split() == ["run", "state", "objective", "learning_rate", "num_train_epochs", "width"]
    assert first.split()[0] == f"run-{best.run_id}"
    assert first.split()[-1] == "3"
    objectives = [float(line.split()[2]) for line in (first, *others[:-1])]
    assert objectives == sorted(objectives, reverse=True)
    assert others[-1].split()[:2] == ["run-1", "failed"]  # and no objective
    assert len(others) == 3


def test_a_long_table_of_trials_is_cut():
    records = [TrialRecord(n, "complete", values=[float(n)]) for n in range(33)]
    lines = table_of_trials(records, ["minimize"]).splitlines()
    assert lines[2].split() == ["run-0", "complete", "0"]
    assert lines[-1] == "  and 3 more"
    assert len(lines) == 33


def test_the_arguments_are_as_before_afterwards_also_after_an_exception(make_search):
    trainer = make_search()
    before = (trainer.args, trainer.args.to_dict(), trainer.args.origin("learning_rate"))
    trainer.hyperparameter_search(space, n_trials=2)
    assert (trainer.args, trainer.args.to_dict(), trainer.args.origin("learning_rate")) == before

    def fails(metrics):
        trainer.args.weight_decay = 0.7  # whoever changed it
        raise RuntimeError("no")

    trainer.args.output_dir += "-2"
    with pytest.raises(RuntimeError, match="no"):
        trainer.hyperparameter_search(space, fails, n_trials=2)
    assert trainer.args.weight_decay == 0.0
    assert trainer.trial is None
    assert trainer.search is None


def test_the_best_hyperparameters_can_be_set_and_trained(make_search):
    trainer = make_search()
    best = trainer.hyperparameter_search(space, n_trials=3)
    for name, value in best.hyperparameters.items():
        setattr(trainer.args, name, value)
    trainer.train()
    assert trainer.evaluate()["eval_loss"] == best.objective


def test_each_trial_has_a_new_model_of_its_own_seed(make_search):
    recorder = Recorder()
    trainer = make_search(callbacks=[recorder])
    trainer.hyperparameter_search(lambda trial: {"seed": [1, 2, 1][trial.number]}, n_trials=3)
    first, second, third = (run["weights"] for run in recorder.runs)
    assert torch.equal(first, third)
    assert not torch.equal(first, second)


def test_each_trial_writes_to_a_folder_of_its_own(make_search, tmp_path):
    recorder = Recorder()
    trainer = make_search(callbacks=[recorder])
    trainer.hyperparameter_search(space, n_trials=2)
    folders = [tmp_path / "out" / f"run-{number}" for number in (0, 1)]
    assert [run["args"]["output_dir"] for run in recorder.runs] == [str(folder) for folder in folders]
    assert all((folder / "metrics.jsonl").exists() for folder in folders)
    assert not (tmp_path / "out" / "metrics.jsonl").exists()


def test_the_state_says_which_trial_it_is(make_search):
    recorder = Recorder()
    trainer = make_search(callbacks=[recorder])
    trainer.hyperparameter_search(space, n_trials=2, hp_name=lambda trial: f"mine-{trial.number}")
    for number, run in enumerate(recorder.runs):
        assert run["state"]["is_hyper_param_search"] is True
        assert run["state"]["trial_name"] == f"mine-{number}"
        assert run["state"]["trial_params"]["learning_rate"] == run["args"]["learning_rate"]
    trainer.train()
    assert (trainer.state.is_hyper_param_search, trainer.state.trial_params) == (False, None)


def test_values_become_what_the_argument_is(make_search):
    recorder = Recorder()
    trainer = make_search(callbacks=[recorder])
    given = {
        "logging_first_step": "False",
        "learning_rate": "1e-3",
        "per_device_train_batch_size": 4.0,
        "max_steps": "2",
    }
    best = trainer.hyperparameter_search(lambda trial: given, n_trials=1)
    assert best.hyperparameters == {
        "logging_first_step": False,
        "learning_rate": 1e-3,
        "per_device_train_batch_size": 4,
        "max_steps": 2,
    }
    assert recorder.runs[0]["args"]["logging_first_step"] is False
    assert type(best.hyperparameters["per_device_train_batch_size"]) is int


BAD_SPACES = [
    ({"lerning_rate": 1.0}, "hp_space: unknown argument lerning_rate; did you mean learning_rate?"),
    ({"learning_rate": "fast"}, "hp_space: learning_rate = 'fast' .*: needs a number"),
    ({"bf16": True, "lr": 1}, "hp_space: unknown argument lr; bf16 is fixed when the Trainer is built"),
    ({"output_dir": "x"}, "output_dir is fixed when the Trainer is built and cannot be searched"),
    ({"no_cuda": True}, "no_cuda is fixed when the Trainer is built and cannot be searched"),
    (None, "hp_space returned None; it must return a dict of training arguments"),
    ({"max_steps": 0}, "hp_space: max_steps = 0 .*: needs at least 1"),
]


@pytest.mark.parametrize(("given", "message"), BAD_SPACES)
def test_a_space_that_cannot_be_set_is_refused_before_the_first_run(make_search, given, message):
    recorder = Recorder()
    trainer = make_search(callbacks=[recorder])
    with pytest.raises(ValueError, match=message):
        trainer.hyperparameter_search(lambda trial: given, n_trials=2)
    assert recorder.runs == []
    assert trainer.args.learning_rate == 5e-5


def test_arguments_that_contradict_each_other_in_a_trial_are_refused(make_search):
    with pytest.raises(ValueError, match="dataloader_prefetch_factor .* needs loading processes"):
        make_search().hyperparameter_search(lambda trial: {"dataloader_prefetch_factor": 2}, n_trials=1)


def test_what_the_default_callbacks_are_built_from_cannot_be_searched(make_args):
    """A callback is built once, with the Trainer: a trial's value would not reach it."""

    class Watching:
        def __init__(self, args):
            self.args, self.read = args, set()

        def __getattr__(self, name):
            self.read.add(name)
            return getattr(self.args, name)

    from tr_core import SingleDevice
    from tr_core.callbacks.defaults import default_callbacks
    from tr_core.choose_strategy import choose_strategy

    args = Watching(make_args())
    default_callbacks(args, SingleDevice("cpu"))
    choose_strategy(args)
    acts_later = {"logging_strategy", "eval_strategy", "save_strategy", "parameter_rules"}
    acts_later.add("place_model_on_device")  # a property of a subclass
    assert args.read - acts_later - set(facts(TrainingArguments, Later.NEW_TRAINER)) == set()


# What a search needs


def test_a_search_needs_a_model_init(make_trainer):
    with pytest.raises(ValueError, match="needs a new model for every trial; give the Trainer a model_init"):
        make_trainer(eval_dataset=samples(4)).hyperparameter_search(space)


def needs_two(first, second):
    return Classifier()


@pytest.mark.parametrize(
    ("model_init", "message"),
    [
        (needs_two, "model_init needs the arguments first, second; it may need none, or one, which is the trial"),
        (lambda *, size: Classifier(), "model_init needs the arguments size"),
        (lambda trial: None, "model_init returned None; it must return a torch.nn.Module"),
    ],
)
def test_a_model_init_that_cannot_be_called_is_refused_at_construction(make_search, model_init, message):
    with pytest.raises((ValueError, TypeError), match=message):
        make_search(model_init=model_init)


def test_a_model_init_with_an_argument_is_given_the_trial(make_search):
    given = []

    def model_init(trial):
        given.append(None if trial is None else trial.number)
        return Classifier(0.0 if trial is None else trial.suggest_float("dropout", 0.1, 0.5))

    best = make_search(model_init=model_init).hyperparameter_search(space, n_trials=2)
    assert given == [None, 0, 1]
    assert 0.1 <= best.hyperparameters["dropout"] <= 0.5
    assert [set(trial["params"]) for trial in best.run_summary] == [
        {"learning_rate", "num_train_epochs", "dropout"}
    ] * 2


def test_a_trial_can_be_given_to_train(make_search):
    given = []

    def model_init(trial=None):
        given.append(trial)
        return Classifier()

    trainer = make_search(model_init=model_init)
    trainer.train()
    trainer.train(trial={"size": 3})
    assert given == [None, {"size": 3}]
    assert trainer.state.trial_params == {"size": 3}
    assert trainer.state.is_hyper_param_search is True
    assert trainer.args.learning_rate == 5e-5


NEEDS = [
    ({}, {"direction": "min"}, "direction='min' is not known; give minimize or maximize, or a list of them"),
    ({}, {"direction": []}, "there must be at least one of each"),
    ({}, {"n_trials": 0}, "n_trials=0: there must be at least one of each"),
    ({"eval_dataset": None, "eval_strategy": "no"}, {}, "compares evaluations, but eval_dataset is None"),
    ({"resume_from_checkpoint": "x"}, {}, "would have every trial go on from one checkpoint"),
    ({"checkpointer": object()}, {}, "the checkpointer that the Trainer was given has one folder for all trials"),
    ({}, {"backend": "ray"}, "unknown backend 'ray'; it is one of random, grid, optuna"),
    ({}, {"backend": "randon"}, "unknown backend 'randon'; .*; did you mean random"),
    ({}, {"sampler": 1}, "backend='random' does not take sampler.*; it takes seed; set backend='optuna' for"),
    ({}, {"n_trails": 3}, "does not take n_trails; did you mean n_trials"),
    ({}, {"backend": "grid", "seed": 3}, "backend='grid' does not take seed.*; it takes points"),
    ({}, {"backend": "grid", "points": 0}, "points=0 must be at least 1"),
]


@pytest.mark.parametrize(("parts", "options", "message"), NEEDS)
def test_what_is_missing_or_in_the_way_is_said_first(make_search, parts, options, message):
    recorder = Recorder()
    trainer = make_search(callbacks=[recorder], **parts)
    with pytest.raises(ValueError, match=message):
        trainer.hyperparameter_search(space, **options)
    assert recorder.runs == []


def test_runs_of_a_search_are_not_pushed(make_search):
    trainer = make_search()
    trainer.args.push_to_hub = True
    with pytest.raises(ValueError, match="push_to_hub=True would push every trial to one repository"):
        trainer.hyperparameter_search(space)


@pytest.mark.parametrize("backend", [None, "grid", "optuna"])
def test_optuna_is_named_where_it_is_missing(make_search, monkeypatch, backend):
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(ImportError, match=r"hyperparameter_search needs optuna; pip install 'tr-core\[optuna\]'"):
        make_search().hyperparameter_search(space, backend=backend)


# Objectives


def test_the_default_objective_is_the_loss_or_the_sum_of_the_other_metrics():
    times = {"eval_runtime": 5.0, "eval_samples_per_second": 7.0, "eval_steps_per_second": 9.0, "epoch": 3.0}
    assert default_compute_objective({"eval_loss": 0.5, **times}) == 0.5
    assert default_compute_objective({"eval_loss": 0.5, "eval_perplexity": 1.6, **times}) == 0.5
    assert default_compute_objective({"eval_loss": 0.5, "eval_f1": 0.25, "eval_accuracy": 0.5, **times}) == 0.75


def test_the_objective_is_that_of_the_last_evaluation_in_training(make_search):
    seen = []

    def objective(metrics):
        seen.append(metrics["eval_loss"])
        return metrics["eval_loss"]

    best = make_search(num_train_epochs=3).hyperparameter_search(lambda trial: {}, objective, n_trials=1)
    assert len(seen) == 3
    assert best.objective == seen[-1]
    assert list(best.run_summary[0]["reports"].values()) == seen


def test_without_evaluations_in_training_one_is_made_at_its_end(make_search):
    trainer = make_search(eval_strategy="no")
    best = trainer.hyperparameter_search(lambda trial: {}, n_trials=1)
    assert best.objective == trainer.evaluate()["eval_loss"]


def test_several_objectives_give_all_trials_that_no_other_beats(make_search):
    given = iter([(1, 1), (0, 0), (2, 3), (0, 1), (1, 4)])
    front = make_search(eval_strategy="no").hyperparameter_search(
        lambda trial: {}, lambda metrics: next(given), n_trials=5, direction=["minimize", "maximize"]
    )
    assert [(run.run_id, run.objective) for run in front] == [("3", [0.0, 1.0]), ("4", [1.0, 4.0])]


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ([1.0, 2.0], r"returned 2 values, \[1.0, 2.0\], for 1 directions, \['minimize'\]; they must be as many"),
        ("low", "compute_objective returned 'low'; it must return a number"),
        (None, "compute_objective returned None; it must return a number"),
    ],
)
def test_an_objective_that_is_no_number_is_refused(make_search, result, message):
    with pytest.raises(ValueError, match=message):
        make_search().hyperparameter_search(space, lambda metrics: result, n_trials=1)


def test_a_trial_whose_objective_is_nan_fails_and_is_not_the_best(make_search):
    given = iter([float("nan"), 2.0])
    best = make_search(eval_strategy="no").hyperparameter_search(lambda t: {}, lambda metrics: next(given), n_trials=2)
    assert (best.run_id, best.objective) == ("1", 2.0)
    assert best.run_summary[0]["error"] == "an objective is NaN"


@pytest.mark.parametrize(("direction", "best"), [("minimize", "1"), ("maximize", "0")])
def test_the_earliest_of_equal_trials_is_the_best(make_search, direction, best):
    given = iter([2.0, 1.0, 1.0, 2.0])
    found = make_search(eval_strategy="no").hyperparameter_search(
        lambda trial: {}, lambda metrics: next(given), n_trials=4, direction=direction
    )
    assert found.run_id == best


def test_a_search_without_a_complete_trial_says_so(make_search):
    def objective(metrics):
        raise ArithmeticError("too hard")

    with pytest.raises(
        ValueError, match=r"no trial of the search is complete \(2 failed\); .*ArithmeticError: too hard"
    ):
        make_search().hyperparameter_search(space, objective, n_trials=2, catch=ArithmeticError)


def test_a_trial_that_fails_with_what_is_caught_does_not_end_the_search(make_search):
    given = iter([1.0, None, 3.0])

    def objective(metrics):
        if (value := next(given)) is None:
            raise ArithmeticError("too hard")
        return value

    best = make_search(eval_strategy="no").hyperparameter_search(
        lambda t: {}, objective, n_trials=3, catch=(ArithmeticError,)
    )
    assert [trial["state"] for trial in best.run_summary] == ["complete", "failed", "complete"]


def test_a_callback_may_prune_a_trial(make_search):
    class Pruning(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.trial_name == "1":
                raise TrialPrunedError

    best = make_search(callbacks=[Pruning()]).hyperparameter_search(space, n_trials=2, hp_name=lambda t: str(t.number))
    assert [trial["state"] for trial in best.run_summary] == ["complete", "pruned"]


def test_no_trial_begins_after_the_time_is_up(make_search, monkeypatch):
    clock = iter(range(0, 1000, 10))
    monkeypatch.setattr("tr_core.search.search.time", SimpleNamespace(monotonic=lambda: next(clock)))
    best = make_search().hyperparameter_search(space, n_trials=9, timeout=25)
    assert len(best.run_summary) == 2


# Where trials come from


def test_a_random_search_is_a_function_of_its_seed(make_search, tmp_path):
    found = []
    for number, seed in enumerate((1, 1, 2)):
        trainer = make_search(output_dir=str(tmp_path / str(number)))
        best = trainer.hyperparameter_search(space, n_trials=3, seed=seed)
        found.append([trial["params"] for trial in best.run_summary])
    assert found[0] == found[1]
    assert found[0] != found[2]


def test_a_grid_search_makes_every_point_once(make_search):
    def grid(trial):
        return {
            "learning_rate": trial.suggest_categorical("learning_rate", [1e-3, 1e-2]),
            "num_train_epochs": trial.suggest_int("num_train_epochs", 1, 3),
        }

    best = make_search().hyperparameter_search(grid, backend="grid")
    points = [(t["params"]["learning_rate"], t["params"]["num_train_epochs"]) for t in best.run_summary]
    assert points == [(rate, epochs) for rate in (1e-3, 1e-2) for epochs in (1, 2, 3)]


def test_a_grid_with_more_points_than_trials_is_refused(make_search):
    with pytest.raises(ValueError, match="the grid has more than n_trials=2 points; raise n_trials"):
        make_search().hyperparameter_search(
            lambda trial: {"seed": trial.suggest_int("seed", 1, 3)}, n_trials=2, backend="grid"
        )


def test_a_grid_knows_all_its_values_before_the_model_is_made(make_search):
    def model_init(trial):
        return Classifier(0.0 if trial is None else trial.suggest_categorical("dropout", [0.0, 0.1]))

    trainer = make_search(model_init=model_init)
    with pytest.raises(ValueError, match="'dropout' is asked for after hp_space, which for a grid is too late"):
        trainer.hyperparameter_search(lambda trial: {"seed": trial.suggest_int("seed", 1, 2)}, backend="grid")


def test_a_grid_follows_a_space_that_depends_on_its_own_values(make_search):
    def conditional(trial):
        name = trial.suggest_categorical("optim", ["sgd", "adamw_torch"])
        return {"optim": name} | ({"weight_decay": trial.suggest_float("w", 0, 1, step=0.5)} if name == "sgd" else {})

    best = make_search().hyperparameter_search(conditional, backend="grid")
    found = [trial["arguments"] for trial in best.run_summary]
    assert found == [{"optim": "sgd", "weight_decay": w} for w in (0, 0.5, 1)] + [{"optim": "adamw_torch"}]


POINTS = [
    (lambda t: t.suggest_float("x", 1e-4, 1e-2, log=True), [1e-4, 1e-3, 1e-2]),
    (lambda t: t.suggest_float("x", 0, 1), [0, 0.5, 1]),
    (lambda t: t.suggest_int("x", 1, 100, log=True), [1, 10, 100]),
]


@pytest.mark.parametrize(("suggest", "expected"), POINTS)
def test_a_range_without_steps_needs_points_for_a_grid(make_search, suggest, expected):
    def one(trial):
        return {"weight_decay": suggest(trial)}

    with pytest.raises(ValueError, match="'x' has no steps to make a grid of; give step=, choices, points="):
        make_search().hyperparameter_search(one, backend="grid")
    best = make_search().hyperparameter_search(one, backend="grid", points=3)
    assert [trial["params"]["x"] for trial in best.run_summary] == pytest.approx(expected)


def test_random_values_depend_on_seed_trial_and_name_alone_and_reach_every_part():
    from tr_core.search.samplers import SeededSampler

    def drawn(suggest):
        quiet = optuna.create_study(sampler=SeededSampler(0))
        return [suggest(quiet.ask()) for _ in range(400)]

    logs = drawn(lambda t: t.suggest_float("x", 1e-6, 1e-2, log=True))
    assert 0.4 < sum(value < 1e-4 for value in logs) / 400 < 0.6
    pairs = drawn(lambda t: (t.suggest_int("x", 1, 4), t.suggest_categorical("y", ["a", None, 3])))
    assert len(set(pairs)) == 12
    assert drawn(lambda t: (t.suggest_float("a", 0, 1), t.suggest_int("x", 1, 4))[1]) == [one for one, _ in pairs]


# Going on


class Interrupted(BaseException):
    """As Ctrl-C."""


def interrupting(at):
    calls = []

    def objective(metrics):
        calls.append(1)
        if len(calls) == at:
            raise Interrupted
        return metrics["eval_loss"]

    return objective


@pytest.mark.parametrize("at", [1, 3, 4])
def test_an_interrupted_search_continues_and_finds_what_it_would_have_found(make_search, tmp_path, at):
    alone = make_search(output_dir=str(tmp_path / "alone")).hyperparameter_search(space, n_trials=4)
    with pytest.raises(Interrupted):
        make_search(output_dir=str(tmp_path / "cut")).hyperparameter_search(space, interrupting(at), n_trials=4)
    recorder = Recorder()
    trainer = make_search(output_dir=str(tmp_path / "cut"), callbacks=[recorder])
    begun = [trial for trial in study(tmp_path / "cut").trials if trial.state.name == "COMPLETE"]
    best = trainer.hyperparameter_search(space, n_trials=4, resume=True)
    assert best == alone
    assert len(recorder.runs) == 4 - len(begun)


def test_a_finished_search_gives_its_result_again_without_a_run_and_can_be_made_longer(make_search):
    first = make_search().hyperparameter_search(space, n_trials=2)
    recorder = Recorder()
    again = make_search(callbacks=[recorder]).hyperparameter_search(space, n_trials=2, resume=True)
    assert again == first
    assert recorder.runs == []
    longer = make_search(callbacks=[recorder]).hyperparameter_search(space, n_trials=3, resume=True)
    assert (len(longer.run_summary), len(recorder.runs)) == (3, 1)


def test_resuming_where_nothing_was_begun_begins(make_search):
    assert len(make_search().hyperparameter_search(space, n_trials=2, resume=True).run_summary) == 2


def test_a_second_search_in_a_folder_is_a_new_one_and_the_first_stays(make_search, tmp_path):
    folder = tmp_path / "out"
    trainer = make_search()
    first = trainer.hyperparameter_search(space, n_trials=2)
    before = (folder / "study.journal").read_bytes()
    for number, again in ((2, trainer), (3, make_search())):
        recorder = Recorder()
        again.add_callback(recorder)
        assert again.hyperparameter_search(space, n_trials=3).run_summary[:2] == first.run_summary
        folders = [run["args"]["output_dir"] for run in recorder.runs]
        assert folders == [str(folder / f"search-{number}" / f"run-{trial}") for trial in range(3)]
    assert (folder / "study.journal").read_bytes() == before


def test_the_newest_search_is_resumed(make_search, tmp_path):
    make_search().hyperparameter_search(space, n_trials=1)
    with pytest.raises(Interrupted):
        make_search().hyperparameter_search(space, interrupting(2), n_trials=3, seed=5)
    alone = make_search(output_dir=str(tmp_path / "alone")).hyperparameter_search(space, n_trials=3, seed=5)
    recorder = Recorder()
    resumed = make_search(callbacks=[recorder]).hyperparameter_search(space, n_trials=3, seed=5, resume=True)
    assert resumed == alone
    assert {run["args"]["output_dir"].split("/")[-2] for run in recorder.runs} == {"search-2"}


def test_a_search_that_had_no_trial_is_begun_again_in_its_place(make_search, tmp_path):
    with pytest.raises(ValueError, match="hp_space returned None"):
        make_search().hyperparameter_search(lambda trial: None, n_trials=1)
    make_search().hyperparameter_search(space, n_trials=1)
    assert not list((tmp_path / "out").glob("search-*"))


def test_another_search_is_not_resumed(make_search):
    make_search().hyperparameter_search(space, n_trials=2, seed=1)
    with pytest.raises(ValueError, match="is of another search: .*'seed': 1.*, not .*'seed': 2"):
        make_search().hyperparameter_search(space, n_trials=2, seed=2, resume=True)
    with pytest.raises(ValueError, match="is of another search"):
        make_search().hyperparameter_search(space, n_trials=2, seed=1, direction="maximize", resume=True)


def test_a_search_with_a_changed_space_is_not_resumed(make_search):
    make_search().hyperparameter_search(space, n_trials=2)
    with pytest.raises(ValueError, match="trial 0 of the earlier search was made with .* hp_space now gives"):
        make_search().hyperparameter_search(
            lambda trial: {"learning_rate": trial.suggest_float("learning_rate", 0.5, 0.6)}, n_trials=2, resume=True
        )


def test_half_a_line_of_a_crash_is_cut_and_a_damaged_one_is_named(make_search, tmp_path):
    path = tmp_path / "out" / "study.journal"
    first = make_search().hyperparameter_search(space, n_trials=2)
    whole = path.read_text()
    path.write_text(whole + '{"op_code": 4, "wor')
    for number in (3, 4):  # what is written after the half line is readable too
        longer = make_search().hyperparameter_search(space, n_trials=number, resume=True)
        assert longer.run_summary[:2] == first.run_summary
    path.write_text(whole.replace('{"op_code":6', "{{", 1))
    with pytest.raises(
        ValueError, match=r"study.journal is not a journal of a search \(.*\); restore it, or remove it"
    ):
        make_search().hyperparameter_search(space, n_trials=3, resume=True)


@pytest.mark.parametrize("content", ["null\n", '{"op_code": 99}\n', '{"a": 1}\n', "[" * 5_000 + "\n\n", "\x00\n\n"])
def test_a_file_that_is_no_journal_is_refused(make_search, tmp_path, content):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "study.journal").write_text(content)
    with pytest.raises(ValueError, match="study.journal is not a journal of a search"):
        make_search().hyperparameter_search(space, n_trials=1, resume=True)


def test_the_journal_of_an_earlier_version_is_refused_and_left_alone(make_search, tmp_path):
    former = tmp_path / "out" / "trials.jsonl"
    former.parent.mkdir()
    former.write_text('{"search": {}}\n')
    with pytest.raises(ValueError, match=r"trials.jsonl is the journal of a search by an earlier version, which is no"):
        make_search().hyperparameter_search(space, n_trials=1, resume=True)
    make_search().hyperparameter_search(space, n_trials=1)
    assert former.read_text() == '{"search": {}}\n'
    assert (tmp_path / "out" / "search-2" / "study.journal").exists()


def test_objectives_without_bounds_are_kept(make_search):
    given = iter([float("inf"), float("nan"), 1.0])
    first = make_search(eval_strategy="no").hyperparameter_search(
        lambda trial: {}, lambda metrics: next(given), n_trials=3
    )
    again = make_search(eval_strategy="no").hyperparameter_search(lambda trial: {}, n_trials=3, resume=True)
    assert again.run_summary[0]["values"] == [float("inf")]
    assert again == first


# Parts that a trial must not leave to the next


def test_callbacks_with_a_state_begin_every_trial_as_they_were(make_search):
    class Counting(TrainerCallback):
        def __init__(self):
            self.steps = 0
            self.begun = []

        def on_train_begin(self, args, state, control, **kwargs):
            self.begun.append(self.steps)

        def on_step_end(self, args, state, control, **kwargs):
            self.steps += 1

        def state_dict(self):
            return {"steps": self.steps}

        def load_state_dict(self, state_dict, /):
            self.steps = state_dict["steps"]

    counting = Counting()
    make_search(callbacks=[counting]).hyperparameter_search(space, n_trials=3)
    assert counting.begun == [0, 0, 0]


# Several processes


class Ranks:
    """What one of two ranks sees: its own value and the other's."""

    def __init__(self, rank, first):
        self.rank, self.first = rank, first

    def gather_objects(self, value):
        return [value if self.rank == 0 else self.first, value]


def test_all_ranks_follow_what_rank_0_decides():
    assert on_rank_zero(Ranks(0, None), lambda: 3) == 3
    assert on_rank_zero(Ranks(1, (3, None)), pytest.fail) == 3


def test_an_error_of_rank_0_is_one_of_all():
    def fails():
        raise KeyError("name")

    with pytest.raises(KeyError, match="name"):
        on_rank_zero(Ranks(0, None), fails)
    with pytest.raises(RuntimeError, match="rank 0 could not go on: KeyError: 'name'"):
        on_rank_zero(Ranks(1, (None, "KeyError: 'name'")), pytest.fail)


def test_an_override_of_evaluate_counts(make_search):
    class Own(Trainer):
        def evaluate(self, *args, **kwargs):
            return {**super().evaluate(*args, **kwargs), "eval_score": 7.0}

    assert make_search(trainer_class=Own).hyperparameter_search(space, n_trials=1).objective == 7.0


def test_a_preflight_makes_no_trial_and_no_file(make_search, monkeypatch, tmp_path):
    monkeypatch.setenv("TR_PREFLIGHT", str(tmp_path / "report.json"))
    with pytest.raises(SystemExit):
        make_search().hyperparameter_search(space, n_trials=2)
    assert (tmp_path / "report.json").exists()
    assert not (tmp_path / "out" / "study.journal").exists()


@pytest.mark.cuda
def test_a_trial_leaves_no_memory_to_the_next(make_search):
    used = []

    class Wide(Classifier):
        def __init__(self):
            super().__init__()
            self.spare = torch.nn.Linear(2048, 2048)  # 16 MiB, and 32 MiB of moments

    class Watching(TrainerCallback):
        def on_train_begin(self, args, state, control, **kwargs):
            used.append(torch.cuda.memory_allocated())
            torch.cuda.reset_peak_memory_stats()

        def on_train_end(self, args, state, control, **kwargs):
            used.append(torch.cuda.max_memory_allocated())

    trainer = make_search(model_init=Wide, callbacks=[Watching()], use_cpu=False)
    trainer.hyperparameter_search(space, n_trials=3)
    begun, peaks = used[0::2], used[1::2]
    assert max(begun) - min(begun) < 2**20
    assert max(peaks) - min(peaks) < 2**20


@pytest.mark.filterwarnings("ignore:Choices for a categorical")  # Optuna warns of them too
def test_choices_that_the_journal_cannot_hold_are_refused(make_search):
    search = make_search()
    with pytest.raises(ValueError, match=r"suggest_categorical\('act', \.\.\.\) has ReLU\(\) among its choices"):
        search.hyperparameter_search(
            lambda trial: {"seed": len(str(trial.suggest_categorical("act", [torch.nn.ReLU()])))}
        )
