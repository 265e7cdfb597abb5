"""A run that dies in an evaluation gets it when it resumes, the last one of the run included."""

import pytest
import torch
from memory_checkpointer import MemoryCheckpointer
from signal_at import assert_ends_alike
from small_models import Classifier, samples

from tr_core import TrainerCallback


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


RUNS = [
    {"eval_strategy": evaluates, "save_strategy": saves, **more}
    for evaluates in ("steps", "epoch")
    for saves in ("steps", "epoch", "best")
    for more in (
        {},
        {"max_steps": 8},
        {"save_steps": 1},
        {"load_best_model_at_end": False, "logging_strategy": "epoch"},
    )
]


@pytest.mark.parametrize("options", RUNS, ids=lambda options: "-".join(map(str, options.values())))
def test_a_run_that_dies_in_any_of_its_evaluations_ends_as_one_that_does_not(build, options, tmp_path):
    alone = build(DiesIn(), checkpointer=MemoryCheckpointer(tmp_path), **options)
    alone.train()
    evaluations = [entry["step"] for entry in alone.state.log_history if "eval_loss" in entry]
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


def test_a_run_that_has_its_last_evaluation_is_finished(build, tmp_path):
    options = {"eval_strategy": "epoch", "save_strategy": "epoch"}
    keeper = MemoryCheckpointer(tmp_path)
    build(checkpointer=keeper, **options).train()
    watch = DiesIn()
    build(watch, checkpointer=keeper, **options).train(resume_from_checkpoint=True)
    assert watch.begun == 0


@pytest.mark.parametrize("delay", [0, 2, 2.5])
def test_an_evaluation_that_is_delayed_beyond_the_end_is_not_made_up(build, tmp_path, delay):
    options = {"eval_strategy": "epoch", "save_strategy": "steps", "save_steps": 10, "eval_delay": delay}
    options["load_best_model_at_end"] = False
    keeper = MemoryCheckpointer(tmp_path)
    build(checkpointer=keeper, **options).train()
    watch = DiesIn()
    build(watch, checkpointer=keeper, **options).train(resume_from_checkpoint=True)
    assert watch.begun == (delay <= 2)


def test_an_epoch_that_a_callback_ended_early_is_ended_by_the_resumed_run_too(build, tmp_path):
    options = {"eval_strategy": "epoch", "save_strategy": "steps", "save_steps": 3}

    def asks():
        return Asks("on_step_end", 3, should_epoch_stop=True)

    alone = build(asks(), checkpointer=MemoryCheckpointer(tmp_path), **options)
    alone.train()
    assert [entry["step"] for entry in alone.state.log_history if "eval_loss" in entry] == [3, 8]
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
