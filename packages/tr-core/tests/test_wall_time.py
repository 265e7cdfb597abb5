"""Log, evaluate, save and stop by the clock, with a clock that the test moves."""

from types import SimpleNamespace

import pytest
import torch
from support.callbacks import Stop, StopAt, on
from support.checkpointer import MemoryCheckpointer
from support.data import samples
from support.models import Classifier

from tr_core import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from tr_core.callbacks.wall_time import WallTimeCallback


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self, now=1000.0):
        self.now = now

    def __call__(self):
        return self.now


class StepTakes(TrainerCallback):
    """Lets every step take so many seconds, and notes what was done at which step."""

    def __init__(self, clock, seconds):
        self.clock, self.seconds = clock, seconds
        self.logged, self.evaluated, self.saved = [], [], []

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        self.clock.now += self.seconds

    def on_log(self, args, state, control, logs, **kwargs):
        if "loss" in logs:
            self.logged.append(state.global_step)

    def on_evaluate(self, args, state, control, **kwargs):
        self.evaluated.append(state.global_step)

    def on_save(self, args, state, control, **kwargs):
        self.saved.append(state.global_step)


@pytest.fixture
def timed(make_trainer, tmp_path):
    """Build a Trainer of ten steps whose clock is moved by its steps alone."""

    def build(seconds=60.0, checkpointer=None, clock=None, **changes):
        torch.manual_seed(0)
        clock = clock or Clock()
        watch = StepTakes(clock, seconds)
        trainer = make_trainer(
            40,
            model=Classifier(),
            eval_dataset=samples(4),
            callbacks=[watch, *changes.pop("callbacks", [])],
            checkpointer=checkpointer or MemoryCheckpointer(tmp_path),
            **changes,
        )
        if trainer.pop_callback(WallTimeCallback) is not None:
            trainer.add_callback(WallTimeCallback(trainer.args, trainer.strategy, clock))
        return trainer, watch

    return build


@pytest.fixture
def lines(heard):
    return heard("info", name="tr_core.callbacks.wall_time")


def test_logs_evaluations_and_checkpoints_are_made_every_so_much_time_and_the_last_step_has_its_own(timed):
    trainer, watch = timed(logging_strategy="2min", eval_strategy="3min", save_strategy="4min")
    trainer.train()
    assert watch.logged == [2, 4, 6, 8, 10]
    assert watch.evaluated == [3, 6, 9, 10]
    assert watch.saved == [4, 8, 10]


def test_what_is_due_several_times_over_is_done_once(timed):
    trainer, watch = timed(seconds=600.0, eval_strategy="1min")
    trainer.train()
    assert watch.evaluated == list(range(1, 11))


def test_the_first_step_that_ends_after_the_time_is_the_one(timed):
    trainer, watch = timed(seconds=50.0, logging_strategy="2min")
    trainer.train()
    assert watch.logged == [3, 6, 9]


def test_how_long_an_action_takes_does_not_count_for_its_own_time(timed):
    clock = Clock()

    def slow(prediction):
        clock.now += 3600
        return {"score": 1.0}

    trainer, watch = timed(clock=clock, eval_strategy="3min", compute_metrics=slow)
    trainer.train()
    assert watch.evaluated == [3, 6, 9, 10]


def test_a_checkpoint_of_another_cause_counts_for_the_next_one(timed):
    class Ask(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_save |= state.global_step == 3

    trainer, watch = timed(callbacks=[Ask()], save_strategy="4min")
    trainer.train()
    assert watch.saved == [3, 7, 10]


def test_an_evaluation_of_the_users_own_does_not_put_off_the_next_one(timed):
    owns = on("on_step_begin", lambda **_: trainer.evaluate(samples(4)))
    trainer, watch = timed(callbacks=[owns], eval_strategy="3min")
    trainer.train()
    own = list(range(10))  # at the beginning of a step the last one is the one that counts
    assert sorted(watch.evaluated) == sorted([*own, 3, 6, 9, 10])


def test_an_evaluation_by_time_waits_for_its_delay(timed):
    trainer, watch = timed(eval_strategy="2min", eval_delay=5)
    trainer.train()
    assert watch.evaluated == [5, 7, 9, 10]


def test_the_best_model_is_loaded_when_evaluations_and_checkpoints_go_by_time(timed):
    values = iter([3.0, 1.0, 2.0, 2.5])
    trainer, watch = timed(
        eval_strategy="3min",
        save_strategy="5min",
        load_best_model_at_end=True,
        metric_for_best_model="score",
        greater_is_better=False,
        compute_metrics=lambda p: {"score": next(values)},
    )
    trainer.train()
    assert (trainer.state.best_global_step, watch.saved) == (6, [3, 6, 10])
    best = trainer.checkpointer().saved[6]["model"]
    assert all(torch.equal(best[name], value) for name, value in trainer.model.state_dict().items())


def test_a_resumed_run_counts_on_from_the_time_that_was_trained(timed):
    """Saved after 4 minutes, of which the evaluation's count is 1 and the log's 0; the second clock is another one."""
    times = {"logging_strategy": "2min", "eval_strategy": "3min", "save_strategy": "4min"}
    memory = MemoryCheckpointer()
    first, _ = timed(checkpointer=memory, callbacks=[StopAt(5)], **times)
    with pytest.raises(Stop):
        first.train()
    assert memory.saved[4]["callbacks"]["WallTimeCallback"] == {
        "seconds_since_log": 0.0,
        "seconds_since_evaluate": 60.0,
        "seconds_since_save": 0.0,
    }
    second, watch = timed(checkpointer=memory, clock=Clock(now=-5.0), **times)
    second.train(resume_from_checkpoint=True)
    assert (watch.logged, watch.evaluated, watch.saved) == ([6, 8, 10], [6, 9, 10], [8, 10])


def test_a_strategy_that_goes_by_time_only_since_the_resume_begins_at_zero(timed):
    memory = MemoryCheckpointer()
    first, _ = timed(checkpointer=memory, callbacks=[StopAt(5)], save_strategy="4min")
    with pytest.raises(Stop):
        first.train()
    second, watch = timed(checkpointer=memory, save_strategy="4min", eval_strategy="3min")
    second.train(resume_from_checkpoint=True)
    assert watch.evaluated == [7, 10]


def test_every_run_of_one_trainer_starts_the_clock_again(timed):
    memory = MemoryCheckpointer()
    options = {"checkpointer": memory, "eval_strategy": "7min", "save_strategy": "5min"}
    with pytest.raises(Stop):
        timed(callbacks=[StopAt(5)], **options)[0].train()
    trainer, watch = timed(**options)
    trainer.train(resume_from_checkpoint=True)
    trainer.train()
    assert watch.evaluated == [7, 10, 7, 10]


# The limit


def test_training_stops_at_the_step_that_passes_its_time_and_saves(timed, lines):
    trainer, watch = timed(max_time="5min", save_strategy="steps", save_steps=100)
    assert trainer.train().global_step == 5
    assert watch.saved == [5]
    assert lines == [
        "max_time='5min' is over: training stops at step 5 of 10, and saves it; train(resume_from_checkpoint=True) "
        "with the same arguments goes on from there"
    ]


def test_a_run_in_two_halves_of_time_ends_as_one_that_was_left_alone(timed, lines):
    options = {"save_strategy": "steps", "save_steps": 100, "num_train_epochs": 2}
    alone, _ = timed(**options)
    alone.train()
    memory = MemoryCheckpointer()
    timed(checkpointer=memory, max_time="13min", **options)[0].train()
    second, _ = timed(checkpointer=memory, max_time="13min", **options)
    assert second.train(resume_from_checkpoint=True).global_step == 20
    assert memory.saves == [13, 20]
    for one, other in zip(alone.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(one, other)
    assert len(lines) == 1


def test_without_checkpoints_the_stop_says_that_nothing_can_continue(timed, lines):
    trainer, watch = timed(max_time="1min", save_strategy="no")
    assert trainer.train().global_step == 1
    assert watch.saved == []
    assert lines == [
        "max_time='1min' is over: training stops at step 1 of 10; save_strategy='no', so there is no checkpoint to go "
        "on from"
    ]


def test_a_stop_that_saves_the_weights_alone_says_so(timed, lines):
    trainer, watch = timed(max_time="1min", save_strategy="steps", save_only_model=True)
    trainer.train()
    assert watch.saved == [1]
    assert lines[0].endswith("save_only_model=True, so its checkpoint holds the weights, but no run can go on from it")


def test_a_stop_saves_once_where_the_end_of_the_epoch_saves_too(timed, lines):
    memory = MemoryCheckpointer()
    trainer, _ = timed(checkpointer=memory, max_time="3min", save_strategy="epoch")
    trainer.train()
    assert memory.saves == [3]


def test_a_stop_saves_even_where_only_the_best_is_saved_and_this_is_not_it(timed, lines):
    values = iter([1.0, 2.0, 3.0])
    memory = MemoryCheckpointer()
    trainer, _ = timed(
        checkpointer=memory,
        max_time="3min",
        save_strategy="best",
        eval_strategy="steps",
        eval_steps=1,
        metric_for_best_model="score",
        greater_is_better=False,
        compute_metrics=lambda p: {"score": next(values)},
    )
    trainer.train()
    assert (memory.saves, trainer.state.best_global_step) == ([1, 3], 1)


def test_a_run_that_ends_by_itself_in_that_step_is_not_stopped(timed, lines):
    trainer, _ = timed(max_time="10min")
    assert trainer.train().global_step == 10
    assert lines == []


# Who decides, and what it costs


def test_without_a_time_there_is_no_clock(make_trainer):
    def has_clock(**changes):
        callbacks = make_trainer(8, eval_dataset=samples(4), **changes).callback_handler.callbacks
        return any(isinstance(callback, WallTimeCallback) for callback in callbacks)

    assert not has_clock(eval_strategy="epoch")
    assert has_clock(eval_strategy="1h")
    assert has_clock(logging_strategy="1h")
    assert has_clock(max_time="1h")


def test_the_clock_of_the_first_rank_decides_and_the_others_ask_for_nothing():
    args = TrainingArguments(logging_strategy="1min", eval_strategy="2min", save_strategy="5min", max_time="4min")
    clocks = (Clock(), Clock(now=7.0))
    ranks = [
        WallTimeCallback(args, SimpleNamespace(rank=rank, world_size=2), clock) for rank, clock in enumerate(clocks)
    ]
    asked = []
    state = TrainerState(max_steps=10)
    for rank in ranks:
        rank.on_train_begin(args, state, TrainerControl())
    for step in range(1, 5):
        for rank in ranks:
            rank.on_step_begin(args, state, TrainerControl())
        state.global_step = step
        clocks[0].now += 60
        clocks[1].now += 100_000  # everything is long due by the second one's
        controls = [TrainerControl(), TrainerControl()]
        for rank, control in zip(ranks, controls, strict=True):
            rank.on_step_end(args, state, control)
        assert controls[1] == TrainerControl()
        asked.append(controls[0])
    # What is asked for is done at the end of the next step, and counted from there.
    assert [control.should_log for control in asked] == [True, False, True, False]
    assert [control.should_evaluate for control in asked] == [False, True, False, False]
    assert [control.should_training_stop for control in asked] == [False, False, False, True]
    assert [control.should_save for control in asked] == [False, False, False, True]
