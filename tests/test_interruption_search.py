"""A search that a signal interrupts keeps its trial as a running one, and goes on with it."""

import signal

import optuna
import pytest
import torch
from shared.data import rows
from shared.models import Classifier

from tr_core import Trainer, TrainerCallback, TrainingArguments
from tr_core.testing import Interrupted


class SignalAt(TrainerCallback):
    def __init__(self, trial, event, step):
        self.trial, self.event, self.step, self.steps = str(trial), event, step, []

    def on_step_begin(self, args, state, control, **kwargs):
        self.steps.append((state.trial_name, state.global_step))
        self._see("on_step_begin", state)

    def on_prediction_step(self, args, state, control, **kwargs):
        self._see("on_prediction_step", state)

    def _see(self, event, state):
        if (state.trial_name, event, state.global_step) == (self.trial, self.event, self.step):
            self.step = None
            signal.raise_signal(signal.SIGTERM)


def search(folder, callback=None, resume=False, **changes):
    torch.set_num_threads(1)
    options = {
        "per_device_train_batch_size": 4,
        "num_train_epochs": 2,
        "eval_strategy": "epoch",
        "save_strategy": "steps",
        "save_steps": 100,
        "disable_tqdm": True,
        "log_level": "error",
        "use_cpu": True,
    }
    args = TrainingArguments(output_dir=str(folder), **{**options, **changes})
    trainer = Trainer(
        args=args,
        model_init=Classifier,
        train_dataset=rows(24),
        eval_dataset=rows(9, 1),
        callbacks=[] if callback is None else [callback],
    )
    return trainer.hyperparameter_search(
        lambda trial: {"learning_rate": trial.suggest_float("learning_rate", 1e-4, 1e-1, log=True)},
        n_trials=3,
        hp_name=lambda trial: str(trial.number),
        resume=resume,
        catch=Exception,
    )


def states(folder):
    backend = optuna.storages.journal.JournalFileBackend(str(folder / "study.journal"))
    study = optuna.load_study(study_name="search", storage=optuna.storages.JournalStorage(backend))
    return {trial.number: trial.state.name.lower() for trial in study.trials}


@pytest.mark.parametrize(("event", "step", "stopped"), [("on_step_begin", 7, 8), ("on_prediction_step", 6, 6)])
def test_an_interrupted_trial_stays_a_running_one_and_goes_on_from_its_checkpoint(tmp_path, event, step, stopped):
    alone = search(tmp_path / "alone")
    with pytest.raises(Interrupted) as caught:
        search(tmp_path / "cut", SignalAt(1, event, step))
    assert caught.value.checkpoint == tmp_path / "cut" / "run-1" / f"checkpoint-{stopped}"
    assert states(tmp_path / "cut") == {0: "complete", 1: "running"}
    watch = SignalAt(None, "", 0)
    assert search(tmp_path / "cut", watch, resume=True) == alone
    assert watch.steps[0] == ("1", stopped)
    assert states(tmp_path / "cut") == {0: "complete", 1: "complete", 2: "complete"}


def test_the_log_says_how_a_search_goes_on(tmp_path, caplog):
    with pytest.raises(Interrupted):
        search(tmp_path, SignalAt(0, "on_step_begin", 2), log_level="warning")
    [said] = [record.getMessage() for record in caplog.records if "SIGTERM" in record.getMessage()]
    assert said.endswith("hyperparameter_search(resume=True) with the same arguments goes on from there")
