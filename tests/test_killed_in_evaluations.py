"""A process that is killed in an evaluation leaves checkpoints from which the next one makes that evaluation."""

import json
import os
import signal

import pytest
import torch
from shared.data import rows
from shared.models import Classifier
from shared.results import history

from tr_core import Trainer, TrainerCallback, TrainingArguments

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="the killed process is a fork of this one")


class KillAt(TrainerCallback):
    """Kills the process in an evaluation, at its first batch or when its result is there."""

    def __init__(self, event, step):
        self.step = step
        setattr(self, event, self._kill)

    def _kill(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def build(folder, *callbacks, **changes):
    options = {
        "per_device_train_batch_size": 4,
        "num_train_epochs": 2,
        "learning_rate": 0.05,
        "logging_steps": 3,
        "save_steps": 2,
        "eval_steps": 2,
        "metric_for_best_model": "loss",
        "load_best_model_at_end": True,
        "disable_tqdm": True,
        "log_level": "error",
        "use_cpu": True,
    }
    args = TrainingArguments(str(folder), **{**options, **changes})
    return Trainer(Classifier(seed=0), args, train_dataset=rows(20), eval_dataset=rows(12), callbacks=list(callbacks))


def train_and_be_killed(trainer):
    process = os.fork()
    if process == 0:
        try:
            trainer.train()
        finally:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == -signal.SIGKILL


def logged(folder):
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").split("\n")[:-1]
    return [(entry["step"], "eval_loss" in entry, "train_loss" in entry) for entry in map(json.loads, lines)]


@pytest.mark.parametrize("event", ["on_prediction_step", "on_evaluate"])
@pytest.mark.parametrize("asynchronous", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["", "async"])
@pytest.mark.parametrize("saves", ["steps", "epoch", "best"])
@pytest.mark.parametrize("evaluates", ["steps", "epoch"])
def test_a_run_that_is_killed_in_its_last_evaluation_ends_as_one_that_is_not(
    tmp_path, evaluates, saves, asynchronous, event
):
    options = {"eval_strategy": evaluates, "save_strategy": saves, "save_async": asynchronous}
    alone = build(tmp_path / "alone", **options)
    alone.train()
    assert alone.state.best_global_step == 10  # the last evaluation is the best, so that its loss would be seen
    train_and_be_killed(build(tmp_path / "killed", KillAt(event, 10), **options))
    for _ in range(2):  # the second time there is nothing left to do
        resumed = build(tmp_path / "killed", **options)
        resumed.train(resume_from_checkpoint="auto")
        assert history(resumed) == history(alone)
        assert resumed.state.best_metric == alone.state.best_metric
        assert resumed.state.best_global_step == 10
        weights = alone.model.state_dict()
        assert all(torch.equal(value, weights[name]) for name, value in resumed.model.state_dict().items())
    assert logged(tmp_path / "killed") == logged(tmp_path / "alone")
