"""A batch size that was found to fit: kept in checkpoints, and agreed on by all ranks."""

import contextlib

import pytest
import torch
from shared.callbacks import Stop, StopAt
from shared.data import rows
from torch import nn

from tr_core import Trainer, TrainerCallback, TrainingArguments
from tr_dist.testing import run_ranks

TOLERANCE = 2e-6  # 32-bit sums in another order


class Limited(nn.Module):
    """Runs out of memory above a number of samples in training, from some step on."""

    def __init__(self, limit):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 3))
        self.limit, self.forwards = limit, []

    def forward(self, x, labels=None):
        if self.training:
            self.forwards.append(len(x))
            if len(x) > self.limit:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
        logits = self.layers(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class ShrinkAt(TrainerCallback):
    """Leaves less memory from a step on, on one rank."""

    def __init__(self, step, rank):
        self.step, self.rank = step, rank

    def on_step_begin(self, args, state, control, model, **kwargs):
        if state.global_step == self.step and args.process_index == self.rank:
            model.limit = 1


def train(folder, limits, options, stop_at=None, resume=None, shrink_at=None):
    """Run in every rank; returns what the tests compare."""
    args = TrainingArguments(
        output_dir=folder,
        learning_rate=1e-2,
        logging_steps=1,
        disable_tqdm=True,
        log_level="error",
        use_cpu=True,
        optim="sgd",
        **{"save_strategy": "no", "num_train_epochs": 1, **options},
    )
    model = Limited(limits[args.process_index])
    callbacks = [StopAt(stop_at)] if stop_at else []
    callbacks += [ShrinkAt(shrink_at, 1)] if shrink_at else []
    trainer = Trainer(model, args, train_dataset=rows(48), callbacks=callbacks)
    with contextlib.suppress(Stop):
        trainer.train(resume_from_checkpoint=resume)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    result = losses, weights, model.forwards, trainer.state.train_batch_size
    trainer.strategy.close()
    return result


def assert_same(one, other, tolerance=0.0):
    assert one[0] == pytest.approx(other[0], rel=tolerance, abs=tolerance)
    for mine, theirs in zip(one[1], other[1], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)


AUTO = {"auto_find_batch_size": True, "per_device_train_batch_size": 8}


def test_a_resumed_run_begins_with_the_size_that_was_found(tmp_path):
    saving = {**AUTO, "save_strategy": "steps", "save_steps": 2}
    whole = train(str(tmp_path / "whole"), [2], saving)
    begun = train(str(tmp_path / "cut"), [2], saving, stop_at=4)
    resumed = train(str(tmp_path / "cut"), [2], saving, resume=True)
    assert whole[2] == [8, 4, *[2] * 24]
    assert begun[2] == whole[2][:18]
    assert resumed[2] == [2] * 8
    assert resumed[3] == 2
    assert_same(resumed, whole)


def test_a_found_size_of_which_steps_cannot_be_made_is_not_taken_over(tmp_path):
    saving = {"save_strategy": "steps", "save_steps": 2}
    train(str(tmp_path), [2], {**AUTO, **saving}, stop_at=2)
    resumed = train(str(tmp_path), [3], {**AUTO, **saving, "per_device_train_batch_size": 3}, resume=True)
    assert resumed[3] == 3


@pytest.mark.parametrize("sizes", [(2, 8), (8, 2), (4, 4)])
def test_a_resumed_run_has_the_size_of_its_arguments_where_the_saved_one_was_not_found(tmp_path, sizes):
    saved, now = ({**AUTO, "save_strategy": "steps", "save_steps": 1, "per_device_train_batch_size": n} for n in sizes)
    train(str(tmp_path), [99], saved, stop_at=2)
    resumed = train(str(tmp_path), [99], now, resume=True)
    assert resumed[3] == sizes[1] == resumed[2][0]


def test_a_found_size_is_kept_over_several_resumes(tmp_path):
    saving = {**AUTO, "save_strategy": "steps", "save_steps": 1}
    train(str(tmp_path), [2], saving, stop_at=1)
    train(str(tmp_path), [2], {**saving, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}, 2, True)
    resumed = train(str(tmp_path), [99], saving, resume=True)
    assert resumed[3] == 2
    assert set(resumed[2]) == {2}


def test_a_size_chosen_after_one_was_found_is_not_found(tmp_path):
    saving = {"save_strategy": "steps", "save_steps": 1}
    train(str(tmp_path), [2], {**AUTO, **saving}, stop_at=1)
    chosen = {**saving, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 8}
    for number, auto in enumerate((False, True), start=2):
        train(str(tmp_path), [2], {**chosen, "auto_find_batch_size": auto}, number, True)
    assert train(str(tmp_path), [99], {**AUTO, **saving}, resume=True)[3] == 8


def test_without_the_option_a_resumed_run_has_the_size_of_its_arguments(tmp_path):
    saving = {**AUTO, "save_strategy": "steps", "save_steps": 2}
    train(str(tmp_path), [2], saving, stop_at=2)
    resumed = train(str(tmp_path), [8], {**saving, "auto_find_batch_size": False}, resume=True)
    assert resumed[3] == 8


def test_ranks_agree_before_the_first_step_on_what_fits_everywhere(tmp_path):
    options = {**AUTO, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    ranks = run_ranks(train, 2, str(tmp_path / "a"), [99, 2], options, timeout_s=120)
    smaller = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
    expected = run_ranks(train, 2, str(tmp_path / "b"), [99, 99], smaller, timeout_s=120)
    alone = train(str(tmp_path / "c"), [99], {"per_device_train_batch_size": 16})
    for rank, other in zip(ranks, expected, strict=True):
        assert_same(rank, other)
        assert rank[3] == 2
        assert rank[2] == [2] * 12  # three steps of four; the probes leave no trace in the model
        assert_same(rank, alone, TOLERANCE)


def test_a_rank_that_runs_out_of_memory_later_says_so(tmp_path):
    options = {**AUTO, "per_device_train_batch_size": 4}
    with pytest.raises(Exception, match="memory ran out on rank 1 at step 3 with 4 samples .* set per_device_train"):
        run_ranks(train, 2, str(tmp_path), [99, 99], options, None, None, 3, timeout_s=120)


def test_a_sample_that_fits_on_no_size_is_an_error_on_every_rank(tmp_path):
    with pytest.raises(Exception, match=r"memory ran out on ranks \[1\] with 1 sample a device"):
        run_ranks(train, 2, str(tmp_path), [99, 0], AUTO, timeout_s=120)
