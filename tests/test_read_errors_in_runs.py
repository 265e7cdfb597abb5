"""A disk that cannot be read for a moment costs a run nothing; one that cannot be read at all ends it in words."""

import errno
import os
from contextlib import contextmanager

import pytest
import torch
from shared.data import rows
from shared.models import LinearClassifier

from tr_ckpt import UnreadableError
from tr_ckpt.testing import READS, replace_operations, shorten_waits
from tr_core import Trainer, TrainingArguments, set_seed

ERRNOS = (errno.EIO, errno.EACCES, errno.ESTALE)


def trainer(folder, max_steps):
    set_seed(7)
    args = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=4,
        max_steps=max_steps,
        save_steps=2,
        save_total_limit=2,
        lr_scheduler_type="constant",  # which does not depend on where the run ends
        disable_tqdm=True,
        use_cpu=True,
    )
    return Trainer(LinearClassifier(), args, train_dataset=rows(32))


def steps_of(folder):
    return sorted(int(path.name.removeprefix("checkpoint-")) for path in folder.glob("checkpoint-*"))


@pytest.fixture
def stopped(tmp_path):
    """A run that ended at step 6 of 10, with the checkpoints of steps 4 and 6."""
    trainer(tmp_path, 6).train()
    assert steps_of(tmp_path) == [4, 6]
    return tmp_path


@contextmanager
def replaced_reads(replace, delays_s=(), names=READS):
    undo = [shorten_waits(delays_s), replace_operations(replace, names)]
    try:
        yield
    finally:
        for each in undo:
            each()


def failing(number, times):
    """Let every kind of read fail, `times` times each, 0 for always."""
    return replaced_reads(lambda name, original: replaced(original, number, [times]), (0.001, 0.002, 0.003))


def replaced(original, number, left):
    always = left[0] == 0

    def operation(*arguments, **options):
        if always or left[0]:
            left[0] -= 1
            raise OSError(number, os.strerror(number))
        return original(*arguments, **options)

    return operation


@pytest.mark.parametrize("number", ERRNOS)
@pytest.mark.parametrize("resume", ["auto", True])
def test_a_momentary_error_of_reading_changes_nothing_of_a_resumed_run(number, resume, stopped, tmp_path_factory):
    alone = trainer(tmp_path_factory.mktemp("alone"), 10)
    alone.train()
    with failing(number, times=2):
        resumed = trainer(stopped, 10)
        resumed.train(resume_from_checkpoint=resume)
    assert torch.equal(resumed.model.layer.weight, alone.model.layer.weight)
    assert steps_of(stopped) == [8, 10]


@pytest.mark.parametrize("number", ERRNOS)
@pytest.mark.parametrize("resume", ["auto", True, False])
def test_a_lasting_error_of_reading_ends_the_run_and_nothing_is_removed(number, resume, stopped):
    message = rf"cannot be read: {os.strerror(number)} \({errno.errorcode[number]}\)"
    with failing(number, times=0), pytest.raises(ValueError, match=message):
        trainer(stopped, 10).train(resume_from_checkpoint=resume)
    assert steps_of(stopped) == [4, 6]


@pytest.mark.parametrize("place", ["checkpoint-6", "checkpoint-4", "manifest.json", "model.safetensors"])
def test_one_file_that_cannot_be_read_is_neither_damage_nor_a_reason_to_begin_at_step_0(place, stopped):
    def refusing(name, original):
        def open_file(path):
            if place in str(path):
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return original(path)

        return open_file

    with replaced_reads(refusing, names=["open_file"]), pytest.raises(UnreadableError, match=place):
        trainer(stopped, 10).train(resume_from_checkpoint="auto")
    assert steps_of(stopped) == [4, 6]
