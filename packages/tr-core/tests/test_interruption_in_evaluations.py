"""An evaluation that a signal leaves out or cuts short is made by the resumed run."""

import signal
from functools import partial

import pytest
import torch
from signal_at import SignalAt, assert_ends_alike, evaluated, interrupt, saving_trainer
from small_models import Classifier, samples

from tr_core import EarlyStoppingCallback, TrainerCallback


@pytest.fixture
def saving(make_trainer, tmp_path):
    return partial(saving_trainer, make_trainer, tmp_path)


LEFT_OUT = [  # eval_strategy, and where the signal comes
    ("steps", "on_step_begin", 3, 4),
    ("steps", "on_step_end", 4, 4),
    ("steps", "on_prediction_step", 4, 4),
    ("steps", "on_prediction_step", 20, 20),
    ("epoch", "on_prediction_step", 10, 10),
    ("epoch", "on_prediction_step", 20, 20),
]


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


def test_the_last_evaluation_of_a_run_is_made_up_for_and_not_a_second_time(saving):
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
    cut = make(SignalInSecond())
    assert interrupt(cut).step == 2
    assert not any("eval_one_loss" in entry for entry in cut.state.log_history)
    resumed = make(checkpointer=cut.checkpointer())
    resumed.train(resume_from_checkpoint=True)
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
    cut = make(SignalAt("on_prediction_step", 4))
    assert interrupt(cut).step == 4
    resumed = make(checkpointer=cut.checkpointer())
    resumed.train(resume_from_checkpoint=True)
    assert alone.state.global_step == resumed.state.global_step == 4
    assert_ends_alike(alone, resumed)


def test_where_it_ends_the_run_with_a_pass_the_next_place_in_the_data_is_the_next_pass(saving):
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

    def place(trainer):
        run = trainer.checkpointer().saved[10]["run"]
        return run["epoch"], run["samples"], run["pending"]

    alone = make()
    alone.train()
    cut = make(SignalAt("on_prediction_step", 10))
    assert interrupt(cut).step == 10
    assert place(cut) == (0, 40, ["evaluate"])
    resumed = make(checkpointer=cut.checkpointer())
    resumed.train(resume_from_checkpoint=True)
    assert place(resumed) == place(alone) == (1, 0, [])
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
    cut = make(SignalAt("on_prediction_step", 4))
    interrupt(cut)
    make(checkpointer=cut.checkpointer()).train(resume_from_checkpoint=True)
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
