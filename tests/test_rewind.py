"""A run taken back to an earlier checkpoint, or begun anew in an old folder, goes on from what it saved since."""

import json
import logging

import pytest
import torch
from shared.data import rows
from shared.models import Classifier

from tr_core import Trainer, TrainerCallback, TrainingArguments, set_seed


class Killed(Exception):
    """Stands for whatever ends a process."""


class Until(TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            raise Killed


class Beginning(TrainerCallback):
    """Notes the step that training begins at."""

    step = None

    def on_train_begin(self, args, state, control, **kwargs):
        self.step = state.global_step


def trainer(folder, callbacks=(), **changes):
    set_seed(7)
    options = {
        "per_device_train_batch_size": 4,
        "num_train_epochs": 1,
        "learning_rate": 1e-2,
        "logging_steps": 5,
        "save_steps": 10,
        "disable_tqdm": True,
        "log_level": "error",
        "use_cpu": True,
    }
    args = TrainingArguments(output_dir=str(folder), **{**options, **changes})
    return Trainer(Classifier(), args, train_dataset=rows(120), eval_dataset=rows(9), callbacks=list(callbacks))


def weights(finished):
    return torch.cat([value.reshape(-1) for value in finished.model.state_dict().values()])


def steps_of(folder):
    return sorted(int(path.name.split("-")[1]) for path in folder.glob("checkpoint-*"))


def begun_at(folder, resume, **changes):
    """Resume and train to the end; returns the step that it began at, and the trainer."""
    beginning = Beginning()
    finished = trainer(folder, [beginning], **changes)
    finished.train(resume_from_checkpoint=resume)
    return beginning.step, finished


@pytest.fixture
def complete(tmp_path):
    """A folder with the checkpoints 10, 20 and 30 of a complete run."""
    trainer(tmp_path).train()
    assert steps_of(tmp_path) == [10, 20, 30]
    return tmp_path


@pytest.mark.parametrize("resume", [True, "auto"])
def test_a_crash_after_going_back_resumes_from_what_was_saved_since(complete, resume):
    """Taken back to 10, it saves 12 and dies: the 30 it left behind is not what it goes on from."""
    changes = {"learning_rate": 1e-3, "save_steps": 12}
    with pytest.raises(Killed):
        trainer(complete, [Until(15)], **changes).train(resume_from_checkpoint=str(complete / "checkpoint-10"))
    assert steps_of(complete) == [10, 12, 20, 30]
    step, resumed = begun_at(complete, resume, **changes)
    assert step == 12

    left_alone = trainer(complete, **changes)
    left_alone.train(resume_from_checkpoint=str(complete / "checkpoint-10"))
    assert torch.equal(weights(resumed), weights(left_alone))


def test_a_crash_before_anything_was_saved_since_resumes_from_the_newest_there_is(complete):
    with pytest.raises(Killed):
        trainer(complete, [Until(11)], save_steps=12).train(resume_from_checkpoint=str(complete / "checkpoint-10"))
    step, resumed = begun_at(complete, True)
    assert step is None  # 30 is the end of that run, and it stays untouched
    assert resumed.state.global_step == 30


def test_a_run_begun_anew_in_an_old_folder_goes_on_from_its_own_checkpoint(complete, caplog):
    logging.getLogger("tr_core").addHandler(caplog.handler)
    try:
        with pytest.raises(Killed):
            trainer(complete, [Until(7)], save_steps=5, log_level="warning").train()
    finally:
        logging.getLogger("tr_core").removeHandler(caplog.handler)
    told = "holds checkpoints of an earlier run, up to step 30: resuming takes those until this run has saved its first"
    assert told in caplog.text
    assert begun_at(complete, True, save_steps=5)[0] == 5


def test_what_was_left_behind_stays_until_a_run_resumed_from_what_is_newer(complete):
    trainer(complete, [], save_steps=4, save_total_limit=2, max_steps=18).train(
        resume_from_checkpoint=str(complete / "checkpoint-10")
    )
    assert steps_of(complete) == [16, 18, 20, 30]
    trainer(complete, [], save_steps=4, save_total_limit=2, max_steps=19).train(resume_from_checkpoint=True)
    assert steps_of(complete) == [18, 19]


def test_a_limit_leaves_what_an_earlier_run_saved_to_a_run_begun_anew(complete):
    trainer(complete, [], save_steps=4, save_total_limit=1, max_steps=9).train()
    assert steps_of(complete) == [9, 10, 20, 30]


EVALUATED = {"eval_strategy": "steps", "eval_steps": 5, "save_steps": 5, "max_steps": 25}


class Scores(TrainerCallback):
    """Makes the evaluation of one step the best."""

    def __init__(self, best):
        self.best = best

    def __call__(self, prediction):
        return {"score": float(self.now == self.best)}

    def on_step_end(self, args, state, control, **kwargs):
        self.now = state.global_step


@pytest.mark.parametrize(
    ("best", "limit", "every", "kept"),
    [
        (5, 2, None, [5, 25]),
        (5, 1, None, [5, 25]),
        (25, 1, None, [25]),
        (10, 3, None, [10, 20, 25]),
        (5, 1, 10, [5, 10, 20, 25]),
        (10, 1, 10, [10, 20, 25]),
        (5, None, 10, [5, 10, 15, 20, 25]),
    ],
)
def test_the_best_and_the_last_stay_also_at_the_end_of_the_run(tmp_path, best, limit, every, kept):
    scores = Scores(best)
    run = trainer(
        tmp_path,
        [scores],
        metric_for_best_model="score",
        greater_is_better=True,
        save_total_limit=limit,
        save_keep_every=every,
        **EVALUATED,
    )
    run.compute_metrics = scores
    run.train()
    assert run.state.best_global_step == best
    assert steps_of(tmp_path) == kept
    last = json.loads((tmp_path / "checkpoint-25" / "trainer_state.json").read_text())
    assert last["best_model_checkpoint"] == str(tmp_path / f"checkpoint-{best}")
