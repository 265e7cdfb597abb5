"""An evaluation that a signal skips or that a dying run does not complete is made by the resumed run."""

import signal

import pytest
import torch
from support.callbacks import SignalAt, evaluated
from support.checkpointer import MemoryCheckpointer
from support.data import samples
from support.models import Classifier
from support.runs import assert_ends_alike, interrupt, steps_with

from tr_core import EarlyStoppingCallback, TrainerCallback
from tr_core.data.position import DataPosition
from tr_core.training import _is_within_epoch

LEFT_OUT = [  # eval_strategy, and where the signal comes
    ("steps", "on_step_begin", 3, 4),
    ("steps", "on_step_end", 4, 4),
    ("steps", "on_prediction_step", 4, 4),
    ("steps", "on_prediction_step", 20, 20),
    ("epoch", "on_prediction_step", 10, 10),
    ("epoch", "on_prediction_step", 20, 20),
]


def cut_and_resumed(make, signals, step):
    """Train until a signal ends the run at a step, and go on with it; return both Trainers."""
    cut = make(signals)
    assert interrupt(cut).step == step
    resumed = make(checkpointer=cut.checkpointer())
    resumed.train(resume_from_checkpoint=True)
    return cut, resumed


@pytest.mark.parametrize("saves", ["steps", "epoch", "best"])
@pytest.mark.parametrize(("evaluates", "event", "step", "stopped"), LEFT_OUT)
def test_an_evaluation_that_a_signal_leaves_out_is_made_by_the_resumed_run(
    saving, event, step, stopped, evaluates, saves
):
    def make(*callbacks, **more):
        return saving(
            *callbacks,
            eval_strategy=evaluates,
            eval_steps=4,
            save_strategy=saves,
            save_steps=4,
            num_train_epochs=2,
            load_best_model_at_end=saves == "best",
            metric_for_best_model="loss",
            **more,
        )

    alone_watch, cut_watch, watch = SignalAt("", 0), SignalAt(event, step), SignalAt("", 0)
    alone = make(alone_watch)
    alone.train()
    cut = make(cut_watch)
    assert interrupt(cut).step == stopped
    assert stopped not in evaluated(cut_watch)
    assert cut_watch.noted[-2:] == [("save", stopped), ("train_end", stopped)]
    resumed = make(watch, checkpointer=cut.checkpointer())
    resumed.train(resume_from_checkpoint=True)
    assert evaluated(cut_watch) + evaluated(watch) == evaluated(alone_watch)
    assert_ends_alike(alone, resumed)


def test_a_missed_last_evaluation_is_made_by_the_resumed_run_and_only_once(saving):
    def make(*callbacks, **more):
        return saving(*callbacks, eval_strategy="steps", eval_steps=100, **more)

    alone = make()
    alone.train()
    cut = make(SignalAt("on_prediction_step", 10))
    assert interrupt(cut).step == 10
    watch = SignalAt("", 0)
    resumed = make(watch, checkpointer=cut.checkpointer())
    resumed.train(resume_from_checkpoint=True)
    assert evaluated(watch) == [10]
    assert cut.checkpointer().saves == [10, 10]
    assert_ends_alike(alone, resumed)
    again = SignalAt("", 0)
    make(again, checkpointer=cut.checkpointer()).train(resume_from_checkpoint=True)
    assert again.noted == []


def test_of_several_data_sets_no_result_is_logged_or_counted_twice(saving):
    """The signal comes in the second data set, when the first one's result is there already."""

    class SignalInSecond(TrainerCallback):
        batches = 0

        def on_prediction_step(self, args, state, control, **kwargs):
            self.batches += 1
            if self.batches == 5:  # three batches a set
                signal.raise_signal(signal.SIGTERM)

    class Counts(TrainerCallback):
        count = 0

        def on_evaluate(self, args, state, control, **kwargs):
            self.count += 1

        def state_dict(self):
            return {"count": self.count}

        def load_state_dict(self, state):
            self.count = state["count"]

    def make(*callbacks, **more):
        return saving(
            EarlyStoppingCallback(3, 100.0),
            Counts(),
            *callbacks,
            eval_strategy="steps",
            eval_steps=2,
            eval_dataset={"one": samples(12), "two": samples(12)},
            metric_for_best_model="one_loss",
            **more,
        )

    alone = make()
    alone.train()
    cut, resumed = cut_and_resumed(make, SignalInSecond(), 2)
    assert not any("eval_one_loss" in entry for entry in cut.state.log_history)
    assert alone.state.global_step == resumed.state.global_step == 8  # patience: the first result is the best
    counts = [c.count for run in (alone, resumed) for c in run.callback_handler.callbacks if isinstance(c, Counts)]
    assert counts == [8, 8]
    assert_ends_alike(alone, resumed)


def test_an_evaluation_that_would_have_ended_the_run_ends_the_resumed_one(saving):
    def make(*callbacks, **more):
        return saving(
            EarlyStoppingCallback(1, 100.0),
            *callbacks,
            eval_strategy="steps",
            eval_steps=2,
            logging_strategy="epoch",
            metric_for_best_model="loss",
            **more,
        )

    alone = make()
    alone.train()
    _, resumed = cut_and_resumed(make, SignalAt("on_prediction_step", 4), 4)
    assert alone.state.global_step == resumed.state.global_step == 4
    assert_ends_alike(alone, resumed)


def test_where_it_ends_the_run_with_an_epoch_the_next_position_is_the_next_epoch(saving):
    def make(*callbacks, **more):
        return saving(
            EarlyStoppingCallback(1, 100.0),
            *callbacks,
            eval_strategy="steps",
            eval_steps=5,
            save_strategy="epoch",
            num_train_epochs=2,
            metric_for_best_model="loss",
            **more,
        )

    def position(trainer):
        run = trainer.checkpointer().saved[10]["run"]
        return run["epoch"], run["samples"], run["pending"]

    alone = make()
    alone.train()
    cut = make(SignalAt("on_prediction_step", 10))
    assert interrupt(cut).step == 10
    assert position(cut) == (0, 40, ["evaluate"])
    resumed = make(checkpointer=cut.checkpointer())
    resumed.train(resume_from_checkpoint=True)
    assert position(resumed) == position(alone) == (1, 0, [])
    assert_ends_alike(alone, resumed)


def test_an_evaluation_that_draws_random_numbers_leaves_no_trace_when_it_is_cut(saving):
    class Draws(Classifier):
        def forward(self, x, labels=None):
            torch.rand(3)
            return super().forward(x, labels)

    def make(*callbacks, **more):
        torch.manual_seed(0)
        return saving(*callbacks, model=Draws(), eval_strategy="steps", eval_steps=4, **more)

    def drawn():
        return torch.get_rng_state()

    alone = make()
    alone.train()
    expected = drawn()
    cut_and_resumed(make, SignalAt("on_prediction_step", 4), 4)
    assert torch.equal(drawn(), expected)


def test_an_evaluation_that_a_callback_makes_is_not_cut(saving):
    class Evaluates(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 4:
                self.metrics = trainer.evaluate()

    evaluates = Evaluates()
    trainer = saving(SignalAt("on_prediction_step", 4), evaluates)
    assert interrupt(trainer).step == 4
    assert "eval_loss" in evaluates.metrics


# A run that dies in an evaluation


class Died(Exception):
    pass


class DiesIn(TrainerCallback):
    """Raises in the `number`th evaluation that begins, as a process that dies there leaves no trace of it."""

    def __init__(self, number=0):
        self.number, self.begun, self.at = number, 0, None

    def on_prediction_step(self, args, state, control, **kwargs):
        if self.at != state.global_step:
            self.at, self.begun = state.global_step, self.begun + 1
        if self.begun == self.number:
            raise Died


class Asks(TrainerCallback):
    """Sets flags at an event of a step."""

    def __init__(self, event, step, **flags):
        self.step, self.flags = step, flags
        setattr(self, event, self._ask)

    def _ask(self, args, state, control, **kwargs):
        return self.flags if state.global_step == self.step else None


@pytest.fixture
def build(make_trainer):
    def make(*callbacks, checkpointer, **changes):
        torch.manual_seed(0)
        options = {
            "model": Classifier(),
            "num_train_epochs": 2,
            "learning_rate": 0.05,
            "logging_steps": 3,
            "save_steps": 2,
            "eval_steps": 2,
            "eval_dataset": samples(12, 1),
            "metric_for_best_model": "loss",
            "load_best_model_at_end": True,
        }
        return make_trainer(20, callbacks=[*callbacks], checkpointer=checkpointer, **{**options, **changes})

    return make


# Any two of the values of three options are together in one of them.
SAVES, MORE = (
    ("steps", "epoch", "best"),
    (
        {},
        {"max_steps": 8},
        {"save_steps": 1},
        {"load_best_model_at_end": False, "logging_strategy": "epoch"},
    ),
)
RUNS = [
    {"eval_strategy": ("steps", "epoch")[(i + j) % 2], "save_strategy": saves, **more}
    for i, saves in enumerate(SAVES)
    for j, more in enumerate(MORE)
]


@pytest.mark.parametrize("options", RUNS, ids=lambda options: "-".join(map(str, options.values())))
def test_a_run_that_dies_in_any_of_its_evaluations_ends_as_one_that_does_not(build, options, tmp_path):
    alone = build(DiesIn(), checkpointer=MemoryCheckpointer(tmp_path), **options)
    alone.train()
    evaluations = steps_with(alone, "eval_loss")
    assert len(evaluations) >= 2
    for number in range(1, len(evaluations) + 1):
        keeper = MemoryCheckpointer(tmp_path)
        with pytest.raises(Died):
            build(DiesIn(number), checkpointer=keeper, **options).train()
        resumed = build(checkpointer=keeper, **options)
        resumed.train(resume_from_checkpoint="auto")
        assert_ends_alike(alone, resumed)
        assert resumed.state.best_global_step == alone.state.best_global_step
        assert resumed.state.best_model_checkpoint == alone.state.best_model_checkpoint


@pytest.mark.parametrize("again", [False, True], ids=["new Trainer", "same Trainer"])
def test_no_checkpoint_is_saved_that_the_uninterrupted_run_does_not_save(build, again, tmp_path):
    options = {"eval_strategy": "epoch", "save_strategy": "steps", "save_steps": 5, "load_best_model_at_end": False}
    keeper = MemoryCheckpointer(tmp_path)
    trainer = build(DiesIn(2), Asks("on_epoch_end", 10, should_save=True), checkpointer=keeper, **options)
    with pytest.raises(Died):
        trainer.train()
    assert keeper.saves == [5, 10]
    resumed = trainer if again else build(checkpointer=keeper, **options)
    if again:
        resumed.pop_callback(Asks), resumed.pop_callback(DiesIn)
    resumed.train(resume_from_checkpoint=True)
    assert keeper.saves == [5, 10]


@pytest.mark.parametrize(
    ("saves", "delay", "evaluations"), [("epoch", 0, 0), ("steps", 0, 1), ("steps", 2, 1), ("steps", 2.5, 0)]
)
def test_the_last_evaluation_is_pending_unless_it_was_made_or_is_delayed_beyond_the_end(
    build, tmp_path, saves, delay, evaluations
):
    """A checkpoint of an epoch is saved after its evaluation, one of a step before it."""
    options = {"eval_strategy": "epoch", "save_strategy": saves, "save_steps": 10, "eval_delay": delay}
    options["load_best_model_at_end"] = False
    keeper = MemoryCheckpointer(tmp_path)
    build(checkpointer=keeper, **options).train()
    watch = DiesIn()
    build(watch, checkpointer=keeper, **options).train(resume_from_checkpoint=True)
    assert watch.begun == evaluations


def test_an_epoch_that_a_callback_ended_early_is_ended_by_the_resumed_run_too(build, tmp_path):
    options = {"eval_strategy": "epoch", "save_strategy": "steps", "save_steps": 3}

    def asks():
        return Asks("on_step_end", 3, should_epoch_stop=True)

    alone = build(asks(), checkpointer=MemoryCheckpointer(tmp_path), **options)
    alone.train()
    assert steps_with(alone, "eval_loss") == [3, 8]
    for number in (1, 2):
        keeper = MemoryCheckpointer(tmp_path)
        with pytest.raises(Died):
            build(asks(), DiesIn(number), checkpointer=keeper, **options).train()
        resumed = build(asks(), checkpointer=keeper, **options)
        resumed.train(resume_from_checkpoint=True)
        assert_ends_alike(alone, resumed)


def test_the_mean_loss_of_a_call_that_makes_no_step_is_no_number(build, tmp_path):
    options = {"eval_strategy": "epoch", "save_strategy": "steps", "save_steps": 10}
    keeper = MemoryCheckpointer(tmp_path)
    with pytest.raises(Died):
        build(DiesIn(2), checkpointer=keeper, **options).train()
    loss = build(checkpointer=keeper, **options).train(resume_from_checkpoint=True).training_loss
    assert loss != loss


def test_a_run_that_dies_before_the_log_at_the_end_of_its_last_epoch_gets_it_when_it_resumes(build, tmp_path):
    class DiesAtTheEnd(TrainerCallback):
        def on_epoch_end(self, args, state, control, **kwargs):
            if state.global_step == state.max_steps:
                raise Died

    options = {"eval_strategy": "no", "save_strategy": "steps", "save_steps": 5, "logging_strategy": "epoch"}
    options |= {"load_best_model_at_end": False, "metric_for_best_model": None}
    alone = build(checkpointer=MemoryCheckpointer(tmp_path), **options)
    alone.train()
    keeper = MemoryCheckpointer(tmp_path)
    with pytest.raises(Died):
        build(DiesAtTheEnd(), checkpointer=keeper, **options).train()
    resumed = build(checkpointer=keeper, **options)
    resumed.train(resume_from_checkpoint=True)

    def losses(trainer):
        return [(entry["step"], entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]

    assert losses(resumed) == losses(alone)
    assert [step for step, _ in losses(alone)] == [5, 10]


def test_a_run_is_within_an_epoch_from_its_first_sample_to_the_end_of_it():
    cases = ((0, False), (1, False), (9, False), (9, True))
    found = [_is_within_epoch(DataPosition(samples=samples, is_at_epoch_end=ended)) for samples, ended in cases]
    assert found == [False, True, True, False]
