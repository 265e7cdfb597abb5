"""Several ranks act by one clock, on one beginning of the data, and in one trial."""

import time

import pytest
import torch
from shared.data import SeenRows, rows
from shared.models import LinearClassifier

from tr_core import Trainer, TrainerCallback, TrainingArguments
from tr_core.testing import set_clock
from tr_dist.testing import run_ranks


class Watch(TrainerCallback):
    """Notes what was done at which step, and moves this rank's own clock."""

    def __init__(self, step_s):
        self.now, self.step_s, self.done = float(round(time.monotonic())), step_s, []  # sums of minutes are exact

    def clock(self):
        return self.now

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        self.now += self.step_s

    def on_evaluate(self, args, state, control, metrics, **kwargs):
        self.done.append(("evaluate", state.global_step))

    def on_save(self, args, state, control, **kwargs):
        self.done.append(("save", state.global_step))


def build(folder, watch, **changes):
    number = changes.pop("rows", 40)
    options = {
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2,
        "num_train_epochs": 1,
        "save_strategy": "no",
        "disable_tqdm": True,
        "log_level": "error",
        "use_cpu": True,
        "optim": "sgd",
        "include_for_metrics": ["inputs"],
    }
    return Trainer(
        LinearClassifier(seed=0),
        TrainingArguments(folder, **{**options, **changes}),
        train_dataset=SeenRows(rows(number)),
        eval_dataset=SeenRows(rows(11)),
        callbacks=[watch],
        compute_metrics=lambda p: {"rows": len(p.predictions), "sum": float(p.inputs.sum())},
    )


def train_by_time(folder, resume, **changes):
    """The second rank's clock stands still."""
    trainer = build(folder, Watch(0.0), **changes)
    watch = Watch(60.0 if trainer.strategy.rank == 0 else 0.0)
    trainer.remove_callback(Watch)
    trainer.add_callback(watch)
    set_clock(trainer.callback_handler.callbacks, watch.clock)
    trainer.train(resume_from_checkpoint=resume)
    trainer.strategy.close()
    return watch.done, trainer.state.global_step


def by_time(folder, resume=None):
    return train_by_time(folder, resume, rows=56, eval_strategy="3min", save_strategy="4min", max_time="7min")


def test_the_first_rank_s_clock_decides_for_both_before_and_after_a_resume(tmp_path):
    """Fourteen steps of a minute. The second rank hears of what is due while it makes the next step.

    So of the evaluation that is due at 3 at 4, where the first rank need not wait to save; and of the end at 7 at 8.
    """
    first = run_ranks(by_time, 2, str(tmp_path), timeout_s=120)
    assert first[0] == ([("evaluate", 4), ("save", 4), ("evaluate", 8), ("save", 8)], 8)
    assert first[1] == first[0]
    second = run_ranks(by_time, 2, str(tmp_path), True, timeout_s=120)
    assert second[0] == ([("evaluate", 12), ("save", 12), ("evaluate", 14), ("save", 14)], 14)
    assert second[1] == second[0]


def overfit(folder, batch_size):
    trainer = build(
        folder,
        Watch(0.0),
        overfit_batches=3,
        num_train_epochs=2,
        eval_strategy="epoch",
        per_device_train_batch_size=batch_size,
    )
    trainer.train()
    metrics = trainer.evaluate()
    trainer.strategy.close()
    weights = [parameter.detach().clone() for parameter in trainer.model.parameters()]
    return trainer.train_dataset.seen, metrics["eval_rows"], metrics["eval_sum"], weights


def test_two_ranks_share_the_first_batches_that_one_process_would_use(tmp_path):
    ranks = run_ranks(overfit, 2, str(tmp_path), 2, timeout_s=120)
    alone = overfit(str(tmp_path), 4)
    assert sorted(ranks[0][0] + ranks[1][0]) == sorted(alone[0])
    assert len(set(alone[0])) == 12
    for rank in ranks:
        assert rank[1] == alone[1] == 12
        assert rank[2] == pytest.approx(alone[2], abs=1e-4)
        for mine, theirs in zip(rank[3], alone[3], strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


def trial(folder):
    trainer = build(folder, Watch(0.0), fast_dev_run=2, eval_strategy="epoch", save_strategy="steps")
    trainer.train()
    trainer.save_model()
    metrics = trainer.evaluate()
    trainer.strategy.close()
    return trainer.state.global_step, metrics["eval_rows"]


def test_two_ranks_try_a_run_out_together(tmp_path):
    folder = tmp_path / "out"
    assert run_ranks(trial, 2, str(folder), timeout_s=120) == [(2, 8), (2, 8)]
    assert not folder.exists()
