"""Stop a run anywhere and go on: it ends as the run that was left alone, to the last bit."""

import itertools
import random
import signal
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import torch
from shared.callbacks import Stop, StopAt
from shared.data import SeenRows, rows
from shared.models import Classifier
from shared.results import history
from torch.utils.data import IterableDataset

from tr_core import Trainer, TrainerCallback, TrainingArguments, set_seed


def collate_at_random(samples):
    """Draws from all three generators, as masking and augmentation do."""
    features = torch.stack([sample["x"] for sample in samples])
    features = features + torch.randn_like(features) * random.random() + float(np.random.rand())
    return {"x": features, "labels": torch.stack([sample["labels"] for sample in samples])}


def trainer(folder, dataset=None, callbacks=(), **changes):
    set_seed(7)
    options = {
        "per_device_train_batch_size": 4,
        "num_train_epochs": 3,
        "learning_rate": 1e-2,
        "warmup_steps": 3,
        "logging_steps": 3,
        "save_steps": 2,
        "disable_tqdm": True,
        "log_level": "error",
        "use_cpu": True,
    }
    args = TrainingArguments(output_dir=str(folder), **{**options, **changes})
    data = rows(41) if dataset is None else dataset
    return Trainer(
        Classifier(),
        args,
        train_dataset=data,
        data_collator=collate_at_random,
        callbacks=list(callbacks),
        eval_dataset=rows(9),
    )


def fingerprint(finished):
    """Everything that must be equal: weights, optimizer state, and what was logged of the training itself."""
    weights = [value.clone() for value in finished.model.state_dict().values()]
    moments = [v for state in finished.optimizer.state_dict()["state"].values() for v in state.values()]
    return history(finished), weights, moments


def assert_same(one, other):
    assert one[0] == other[0]
    for mine, theirs in zip(one[1] + one[2], other[1] + other[2], strict=True):
        assert torch.equal(mine, theirs)


def run_stopped_at(step, folder, make):
    with pytest.raises(Stop):
        make(folder, callbacks=[StopAt(step)]).train()
    resumed = make(folder)
    resumed.train(resume_from_checkpoint="auto")
    return resumed


@pytest.mark.parametrize(("accumulation", "workers"), [(1, 0), (2, 2)])
def test_a_stopped_and_resumed_run_ends_bit_equal(tmp_path, accumulation, workers):
    def make(folder, **more):
        return trainer(
            folder,
            gradient_accumulation_steps=accumulation,
            dataloader_num_workers=workers,
            eval_strategy="epoch",
            **more,
        )

    alone = make(tmp_path / "alone")
    alone.train()
    last = alone.state.max_steps
    # `nox -s resume` stops at every step.
    stops = range(1, last, 8) if workers == 0 else (3, last - 1)
    for step in stops:
        resumed = run_stopped_at(step, tmp_path / f"stopped-{step}", make)
        assert_same(fingerprint(alone), fingerprint(resumed))


def test_zero_and_two_workers_give_the_same_bits(tmp_path):
    ends = []
    for workers in (0, 2):
        run = trainer(tmp_path / str(workers), dataloader_num_workers=workers, save_strategy="no")
        run.train()
        ends.append(fingerprint(run))
    assert_same(*ends)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(rows(41))


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_stream_resumes_bit_equal_even_past_its_first_pass(tmp_path, accumulation):
    def make(folder, **more):
        return trainer(folder, Stream(), max_steps=25, gradient_accumulation_steps=accumulation, **more)

    alone = make(tmp_path / "alone")
    alone.train()
    for step in (1, 5, 11, 12, 18, 24):
        assert_same(fingerprint(alone), fingerprint(run_stopped_at(step, tmp_path / str(step), make)))


def test_resume_of_a_finished_run_does_nothing(tmp_path):
    finished = trainer(tmp_path)
    finished.train()
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    again = trainer(tmp_path)
    output = again.train(resume_from_checkpoint=True)
    assert output.global_step == finished.state.global_step
    assert_same(fingerprint(finished)[:2] + ([],), fingerprint(again)[:2] + ([],))
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_resume_true_without_a_checkpoint_says_so_and_auto_begins_anew(tmp_path):
    with pytest.raises(ValueError, match="no valid checkpoint in .* resume_from_checkpoint='auto' to start over"):
        trainer(tmp_path).train(resume_from_checkpoint=True)
    assert trainer(tmp_path).train(resume_from_checkpoint="auto").global_step == 33


@pytest.mark.parametrize(("batch_size", "accumulation"), [(2, 1), (8, 1), (4, 2)])
def test_resume_with_another_batch_size_goes_on_with_the_next_unseen_sample(tmp_path, batch_size, accumulation):
    first = SeenRows(rows(48))
    with pytest.raises(Stop):
        trainer(tmp_path, first, [StopAt(6)], num_train_epochs=1, save_steps=6).train()
    second = SeenRows(rows(48))
    changed = {"per_device_train_batch_size": batch_size, "gradient_accumulation_steps": accumulation}
    resumed = trainer(tmp_path, second, num_train_epochs=1, save_steps=1000, **changed)
    resumed.train(resume_from_checkpoint=True)
    assert sorted(first.seen[:24] + second.seen) == list(range(48))
    assert resumed.state.epoch == 1.0
    assert resumed.state.global_step == 6 + 24 // (batch_size * accumulation)


def test_callbacks_of_one_class_get_their_own_state_back(tmp_path):
    class Counter(TrainerCallback):
        def __init__(self, by):
            self.by, self.count = by, 0

        def on_step_end(self, args, state, control, **kwargs):
            self.count += self.by

        def state_dict(self):
            return {"count": self.count}

        def load_state_dict(self, state):
            self.count = state["count"]

    with pytest.raises(Stop):
        trainer(tmp_path, None, [Counter(1), Counter(10), StopAt(6)]).train()
    counters = [Counter(1), Counter(10)]
    trainer(tmp_path, None, counters).train(resume_from_checkpoint=True)
    assert [counter.count for counter in counters] == [33, 330]


SCRIPT = """
import os, signal, sys
sys.path.insert(0, {tests!r})
import torch
torch.set_num_threads(1)
from test_resume_bitwise import TrainerCallback, fingerprint, trainer

class Kill(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == {step}:
            os.kill(os.getpid(), signal.SIGKILL)

run = trainer({folder!r}, callbacks=[Kill()] if {step} else [])
run.train(resume_from_checkpoint="auto")
torch.save([value for value in run.model.state_dict().values()], {folder!r} + "/end.pt")
"""


@pytest.mark.slow
def test_a_process_killed_by_the_system_is_gone_on_with_bit_equal(tmp_path):
    alone = trainer(tmp_path / "alone")
    alone.train()

    def child(step):
        values = {"tests": __file__.rsplit("/", 1)[0], "folder": str(tmp_path / "killed"), "step": step}
        code = textwrap.dedent(SCRIPT).format(**values)
        return subprocess.run([sys.executable, "-c", code], timeout=120, capture_output=True, text=True)

    for step in (9, 20):
        assert child(step).returncode == -signal.SIGKILL
    finished = child(0)
    assert finished.returncode == 0, finished.stderr
    ends = torch.load(tmp_path / "killed" / "end.pt")
    assert all(itertools.starmap(torch.equal, zip(ends, alone.model.state_dict().values(), strict=True)))


def test_a_checkpoint_of_the_model_alone_is_not_resumed_in_silence(tmp_path):
    with pytest.raises(Stop):
        trainer(tmp_path, None, [StopAt(6)], save_only_model=True).train()
    with pytest.raises(ValueError, match="optimizer"):
        trainer(tmp_path, save_only_model=True).train(resume_from_checkpoint=True)


def test_an_epoch_that_ended_at_the_checkpoint_is_evaluated_by_the_resumed_run(tmp_path):
    """A checkpoint of an epoch's last step is written before that epoch is evaluated."""
    options = {"num_train_epochs": 2, "save_steps": 5, "eval_strategy": "epoch"}
    trainer(tmp_path, rows(18), **options).train()
    again = trainer(tmp_path / "again", rows(18), **options)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-5"))
    assert [entry["step"] for entry in again.state.log_history if "eval_loss" in entry] == [5, 10]


def test_the_last_checkpoint_stays_beside_the_best_one(tmp_path):
    """Without it, resuming the finished run would train from the best one on."""
    scores = iter([1.0, 2.0])
    options = {"num_train_epochs": 2, "save_strategy": "epoch", "eval_strategy": "epoch", "save_total_limit": 1}
    run = trainer(tmp_path, rows(18), metric_for_best_model="score", greater_is_better=False, **options)
    run.compute_metrics = lambda prediction: {"score": next(scores)}  # the first one is the best
    run.train()
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-10", "checkpoint-5"]
