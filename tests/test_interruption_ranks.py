"""A signal that one of two ranks gets ends both at the same step, with one checkpoint."""

import signal
from pathlib import Path

import pytest
import torch
from shared.data import rows
from shared.models import Classifier
from shared.results import history

from tr_core import Trainer, TrainerCallback, TrainingArguments
from tr_core.testing import Interrupted
from tr_dist.testing import run_ranks


class SignalAt(TrainerCallback):
    """Sends signals to its own rank: of `plan`, those of (rank, event, step)."""

    def __init__(self, plan, rank):
        self.plan = {(event, step): number for at, event, step, number in plan if at == rank}
        self.done = []

    def on_step_begin(self, args, state, control, **kwargs):
        self._see("on_step_begin", state)

    def on_prediction_step(self, args, state, control, **kwargs):
        self._see("on_prediction_step", state)

    def on_evaluate(self, args, state, control, **kwargs):
        self.done.append(("evaluate", state.global_step))

    def on_save(self, args, state, control, **kwargs):
        self.done.append(("save", state.global_step))
        self._see("on_save", state)

    def on_train_end(self, args, state, control, error=None, **kwargs):
        self.done.append(("train_end", state.global_step))

    def _see(self, event, state):
        number = self.plan.pop((event, state.global_step), None)
        if number is not None:
            signal.raise_signal(number)


class UnevenTrainer(Trainer):
    """The first rank has more batches to evaluate than the second."""

    def get_eval_dataloader(self, eval_dataset=None):
        return torch.utils.data.DataLoader(self.eval_dataset[: 8 - 4 * self.strategy.rank], batch_size=2)


def build(folder, plan=(), kind=Trainer, **changes):
    options = {
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2,
        "num_train_epochs": 1,
        "logging_steps": 3,
        "save_steps": 100,
        "disable_tqdm": True,
        "log_level": "error",
        "use_cpu": True,
    }
    trainer = kind(
        Classifier(seed=0),
        TrainingArguments(folder, **{**options, **changes}),
        train_dataset=rows(40),
        eval_dataset=rows(16),
    )
    trainer.add_callback(SignalAt(plan, trainer.strategy.rank))
    return trainer


def train(folder, plan=(), resume=None, changes=None, uneven=False):
    """Return how the run ended, what it did, and its weights and log."""
    trainer = build(folder, plan, UnevenTrainer if uneven else Trainer, **(changes or {}))
    ended = None
    try:
        trainer.train(resume_from_checkpoint=resume)
    except Interrupted as error:
        ended = (error.code, error.step)
    trainer.strategy.close()
    watch = next(c for c in trainer.callback_handler.callbacks if isinstance(c, SignalAt))
    weights = [parameter.detach().clone() for parameter in trainer.model.parameters()]
    return ended, watch.done, weights, history(trainer)


def ranks(*arguments):
    return run_ranks(train, 2, *arguments, timeout_s=120)


def folders(place):
    return sorted(path.name for path in Path(place).glob("checkpoint-*"))


def assert_end_alike(alone, resumed):
    for mine, theirs in zip(alone, resumed, strict=True):
        assert mine[3] == theirs[3]
        for one, other in zip(mine[2], theirs[2], strict=True):
            assert torch.equal(one, other)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return ranks(str(tmp_path_factory.mktemp("alone")))


@pytest.mark.parametrize(("rank", "number", "code"), [(0, signal.SIGTERM, 143), (1, signal.SIGINT, 130)])
def test_a_signal_to_one_rank_stops_both_at_one_step_and_the_run_goes_on_bit_equal(tmp_path, alone, rank, number, code):
    cut = ranks(str(tmp_path), [(rank, "on_step_begin", 3, number)])
    # Seen at the end of step 4, and known to both at the end of step 5.
    assert [end for end, *_ in cut] == [(code, 5)] * 2
    assert [done for _, done, *_ in cut] == [[("save", 5), ("train_end", 5)]] * 2
    assert folders(tmp_path) == ["checkpoint-5"]
    assert_end_alike(alone, ranks(str(tmp_path), (), True))


def test_of_two_signals_at_two_steps_the_ranks_take_one(tmp_path):
    plan = [(0, "on_step_begin", 3, signal.SIGINT), (1, "on_step_begin", 3, signal.SIGTERM)]
    assert [end for end, *_ in ranks(str(tmp_path), plan)] == [(143, 5)] * 2


def test_a_signal_that_comes_after_the_others_have_asked_changes_nothing(tmp_path):
    plan = [(0, "on_step_begin", 3, signal.SIGTERM), (1, "on_save", 5, signal.SIGTERM)]
    assert [end for end, *_ in ranks(str(tmp_path), plan)] == [(143, 5)] * 2
    assert folders(tmp_path) == ["checkpoint-5"]


def test_a_save_that_is_due_anyway_is_the_one(tmp_path):
    cut = ranks(str(tmp_path), [(1, "on_step_begin", 3, signal.SIGTERM)], None, {"save_steps": 5})
    assert [(end, done) for end, done, *_ in cut] == [((143, 5), [("save", 5), ("train_end", 5)])] * 2


@pytest.mark.parametrize("step", [8, pytest.param(9, marks=pytest.mark.slow)])
def test_a_signal_with_the_last_step_changes_nothing(tmp_path, alone, step):
    whole = ranks(str(tmp_path), [(1, "on_step_begin", step, signal.SIGTERM)])
    assert [end for end, *_ in whole] == [None, None]
    assert_end_alike(alone, whole)


@pytest.mark.parametrize("saved_by", ["steps", pytest.param("epoch", marks=pytest.mark.slow)])
def test_an_evaluation_is_cut_on_both_ranks_and_made_anew(tmp_path, saved_by):
    changes = {"eval_strategy": "steps", "eval_steps": 4, "save_strategy": saved_by}
    whole = ranks(str(tmp_path / "whole"), (), None, changes)
    cut = ranks(str(tmp_path / "cut"), [(1, "on_prediction_step", 4, signal.SIGTERM)], None, changes)
    assert [(end, done) for end, done, *_ in cut] == [((143, 4), [("save", 4), ("train_end", 4)])] * 2
    resumed = ranks(str(tmp_path / "cut"), (), True, changes)
    assert resumed[0][1][0] == ("evaluate", 4)
    assert_end_alike(whole, resumed)


def test_ranks_with_unlike_numbers_of_batches_of_their_own_end_their_evaluation_first(tmp_path):
    changes = {"eval_strategy": "steps", "eval_steps": 4}
    cut = ranks(str(tmp_path), [(0, "on_prediction_step", 4, signal.SIGTERM)], None, changes, True)
    assert [end for end, *_ in cut] == [(143, 5)] * 2
    assert cut[0][1] == [("evaluate", 4), ("save", 5), ("train_end", 5)]


def fail_in_background(folder, failing, step):
    trainer = build(folder, save_async=True)
    checkpointer, checks = trainer.checkpointer(), []

    def check():
        checks.append(trainer.state.global_step)
        if trainer.strategy.rank == failing and checks[-1] == step and checks.count(step) == 1:
            raise OSError("no space is left")

    checkpointer.check = check
    try:
        trainer.train()
    except Exception as error:
        ended = (type(error), str(error))
    trainer.strategy.close(failed=True)
    return ended, trainer.state.global_step


@pytest.mark.parametrize(("failing", "step"), [(0, 4), (1, 4), (1, 10)])
def test_a_background_save_that_failed_on_one_rank_ends_both(tmp_path, failing, step):
    ends = run_ranks(fail_in_background, 2, str(tmp_path), failing, step, timeout_s=120)
    own, other = ends[failing], ends[1 - failing]
    assert own == ((OSError, "no space is left"), min(step + 1, 10))
    assert other[0][0] is RuntimeError
    assert "a checkpoint could not be written in the background by another rank" in other[0][1]
    assert other[1] == own[1]
