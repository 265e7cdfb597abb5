"""What the log says of checkpoints is true when it says it."""

import logging

import pytest
from memory_checkpointer import MemoryCheckpointer

from tr_core import TrainerCallback


class Late(MemoryCheckpointer):
    """Completes a checkpoint when the next one begins or is waited for, as one that writes in the background may."""

    def __init__(self, folder):
        super().__init__(folder)
        self.commits = []

    def save(self, step, parts, *, on_commit=None, **others):
        self.wait()
        path = super().save(step, parts, **others)
        self.commits.append(lambda: on_commit(path))
        return path

    def wait(self):
        while self.commits:
            self.commits.pop()()


class Steps(TrainerCallback):
    def __init__(self, caplog):
        self.caplog, self.told = caplog, {}

    def on_step_end(self, args, state, control, **kwargs):
        self.told[state.global_step] = saved(self.caplog)


def saved(caplog):
    return [int(text.rpartition("-")[2]) for text in caplog.messages if text.startswith("saved checkpoint ")]


@pytest.fixture
def told(caplog):
    caplog.set_level(logging.INFO, "tr_core.trainer")
    return caplog


def test_a_checkpoint_is_said_to_be_saved_once_it_is_complete(make_trainer, tmp_path, told):
    steps, own = Steps(told), Late(tmp_path)
    options = {"save_strategy": "steps", "save_steps": 2, "save_async": True, "log_level": "info"}
    make_trainer(checkpointer=own, callbacks=[steps], **options).train()  # five steps
    assert own.saves == [2, 4, 5]
    assert steps.told[3] == []  # that of step 2 is still being written
    assert saved(told) == [2, 4, 5]


def test_a_finished_run_is_not_announced_and_says_how_to_go_on(make_trainer, tmp_path, told):
    own = MemoryCheckpointer(tmp_path)
    options = {"save_strategy": "epoch", "checkpointer": own, "log_level": "info"}
    make_trainer(**options).train()
    told.clear()
    make_trainer(**options).train(resume_from_checkpoint=True)
    assert not any(text.startswith("training Classifier") for text in told.messages)
    assert told.messages[-1].endswith("the run is complete; a larger num_train_epochs or max_steps continues it")
