"""Try a script out: a step or two of everything, and nothing left behind."""

import gc
from pathlib import Path

import pytest
import torch
from support.checkpointer import MemoryCheckpointer
from support.data import Stream, samples
from support.models import Classifier

from tr_core import EarlyStoppingCallback, PluginError, Trainer, TrainerCallback


class Counter(TrainerCallback):
    def __init__(self):
        self.batches, self.evaluations, self.logged = 0, [], []

    def on_prediction_step(self, args, state, control, **kwargs):
        self.batches += 1

    def on_evaluate(self, args, state, control, **kwargs):
        self.evaluations.append(state.global_step)

    def on_log(self, args, state, control, logs, **kwargs):
        if "loss" in logs:
            self.logged.append(state.global_step)


@pytest.fixture
def trial(make_trainer):
    def build(**changes):
        counter = Counter()
        changes.setdefault("eval_dataset", samples(40))
        trainer = make_trainer(
            80, callbacks=[counter, *changes.pop("callbacks", [])], **{"fast_dev_run": True, **changes}
        )
        return trainer, counter

    return build


@pytest.mark.parametrize(("value", "number"), [(True, 1), (1, 1), (3, 3)])
@pytest.mark.parametrize("strategy", ["steps", "epoch", "2h"])
def test_so_many_steps_and_batches_of_an_evaluation_and_of_a_prediction_are_made(trial, value, number, strategy):
    trainer, counter = trial(
        fast_dev_run=value, eval_strategy=strategy, eval_delay=2, num_train_epochs=5, logging_steps=500
    )
    assert trainer.train().global_step == number
    assert (counter.evaluations, counter.batches) == ([number], number)
    assert counter.logged == list(range(1, number + 1))
    assert len(trainer.predict(samples(40)).predictions) == 8 * number
    assert counter.batches == 2 * number


def test_fewer_steps_that_were_asked_for_anyway_stay_fewer(trial):
    assert trial(fast_dev_run=3, max_steps=2)[0].train().global_step == 2
    assert trial(fast_dev_run=3, max_steps=20)[0].train().global_step == 3


def test_data_without_a_length_needs_no_number_of_steps(trial):
    assert trial(train_dataset=Stream(samples(40)), fast_dev_run=2)[0].train().global_step == 2


def test_no_checkpoint_is_written_and_none_read_and_the_last_weights_stay(trial, tmp_path):
    memory = MemoryCheckpointer(tmp_path)
    trainer, _ = trial(
        checkpointer=memory,
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="steps",
        save_steps=1,
        load_best_model_at_end=True,
        resume_from_checkpoint="true",
        fast_dev_run=2,
        callbacks=[EarlyStoppingCallback(early_stopping_patience=5)],
    )
    assert trainer.train().global_step == 2
    assert trainer.train(resume_from_checkpoint=True).global_step == 2
    assert memory.saves == []


def test_no_tracker_is_loaded_and_nothing_is_pushed(trial):
    trainer, _ = trial(report_to=["no such tracker"], push_to_hub=True)
    trainer.train()
    assert trainer.push_to_hub() is None
    with pytest.raises(PluginError):
        trial(report_to=["no such tracker"], fast_dev_run=False)


def test_what_a_script_saves_goes_to_a_folder_that_vanishes(trial, tmp_path):
    trainer, _ = trial(logging_dir=str(tmp_path / "logs"))
    output = trainer.train()
    trainer.save_model()
    trainer.save_state()
    trainer.save_metrics("train", output.metrics)
    folder = Path(trainer.args.output_dir)
    assert {"model.safetensors", "trainer_state.json", "train_results.json"} <= {p.name for p in folder.iterdir()}
    assert list(tmp_path.iterdir()) == []
    del trainer

    gc.collect()
    assert not folder.exists()


def test_the_arguments_that_were_passed_stay_as_they_are(make_args, model):
    args = make_args(fast_dev_run=2, save_strategy="steps", report_to=["x"])
    before = args.to_dict()
    trainer = Trainer(model, args, train_dataset=samples(20))
    assert args.to_dict() == before
    assert trainer.args.fast_dev_run == 2
    without = make_args()
    assert Trainer(Classifier(), without, train_dataset=samples(20)).args is without


def test_the_trial_is_the_beginning_of_the_run_it_stands_for(make_trained):
    """With a learning rate that does not depend on the run's length."""
    ends = []
    for changes in ({"max_steps": 3}, {"fast_dev_run": 3}):
        torch.manual_seed(0)
        trainer = make_trained(80, model=Classifier(), lr_scheduler_type="constant", **changes)
        ends.append(trainer.model.state_dict())
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


def test_the_log_says_so_in_one_line(trial, heard, tmp_path):
    lines = heard("info", name="tr_core.data.limits")
    trial(fast_dev_run=2)[0].train()
    assert lines == [
        "fast_dev_run=2: 2 training steps, and as many batches of every evaluation and prediction; no checkpoints, "
        f"trackers, Hub or best model. {tmp_path / 'out'} is not touched: what is saved goes to a temporary folder"
    ]
