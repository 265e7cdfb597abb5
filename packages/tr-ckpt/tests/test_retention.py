"""Old checkpoints go, the right ones, and only when the new one is safe."""

import logging

import pytest
from ckpt_faults import Faults
from ckpt_parts import parts

from tr_ckpt import Checkpointer, catalogue, files
from tr_ckpt.errors import DamagedCheckpointError


@pytest.mark.parametrize(
    ("limit", "best", "kept"),
    [
        (2, 5, [5, 25]),
        (1, 5, [5, 25]),
        (3, 5, [5, 20, 25]),
        (3, None, [15, 20, 25]),
        (1, None, [25]),
        (9, None, [5, 10, 15, 20, 25]),
        (1, 25, [25]),
    ],
)
def test_the_newest_and_the_protected_stay_within_the_limit(limit, best, kept, tmp_path):
    checkpointer = Checkpointer(tmp_path, keep_last=limit)
    for step in (5, 10, 15, 20, 25):
        checkpointer.save(step, parts(step), protected=() if best is None else (best,))
    assert checkpointer.steps() == kept


def test_the_one_just_saved_stays_also_where_later_ones_exist(tmp_path):
    """A run that was taken back to an earlier step."""
    for step in (20, 30):
        Checkpointer(tmp_path).save(step, parts(step))
    checkpointer = Checkpointer(tmp_path, keep_last=1)
    checkpointer.save(15, parts(15))
    assert 15 in checkpointer.steps()


def test_damaged_and_foreign_ones_neither_count_nor_go(tmp_path):
    checkpointer = Checkpointer(tmp_path)
    for step in (1, 2, 3):
        checkpointer.save(step, parts(step))
    (checkpointer.path(2) / "model.json").unlink()
    (tmp_path / "checkpoint-0").mkdir()
    (tmp_path / "checkpoint-0" / "pytorch_model.bin").touch()
    Checkpointer(tmp_path, keep_last=2).save(4, parts(4))
    assert checkpointer.steps() == [3, 4]
    assert checkpointer.path(2).is_dir()
    assert checkpointer.path(0).is_dir()


def test_nothing_is_removed_when_the_new_one_reads_back_damaged(tmp_path, monkeypatch, caplog):
    checkpointer = Checkpointer(tmp_path, keep_last=1)
    checkpointer.save(1, parts(1))
    asked = []

    def verify(folder, described):
        asked.append(folder.name)
        raise DamagedCheckpointError("model.json was changed")

    monkeypatch.setattr(catalogue, "verify", verify)
    checkpointer.save(2, parts(2))
    assert asked == ["checkpoint-2"]
    assert checkpointer.steps() == [1, 2]
    assert "nothing is removed: checkpoint-2, just saved, reads back damaged: model.json was changed" in caplog.text


def test_the_new_one_is_in_place_and_synced_before_an_old_one_is_touched(tmp_path):
    checkpointer = Checkpointer(tmp_path, keep_last=1)
    checkpointer.save(1, parts(1))
    with Faults() as counted:
        checkpointer.save(2, parts(2))
    first = counted.log.index("remove_file")
    assert counted.log[first - 1] == "rename"  # the old one's, out of the way
    assert counted.log[first - 3 : first - 1] == ["rename", "sync_folder"]  # the new one's, before


def test_one_that_cannot_be_removed_is_reported_and_tried_again(tmp_path, monkeypatch, caplog):
    checkpointer = Checkpointer(tmp_path, keep_last=1)
    checkpointer.save(1, parts(1))
    original = files.rename

    def rename(source, target):
        if source.name == "checkpoint-1":
            raise PermissionError(13, "Permission denied")
        original(source, target)

    with monkeypatch.context() as patched:
        patched.setattr(files, "rename", rename)
        checkpointer.save(2, parts(2))
    assert checkpointer.steps() == [1, 2]
    assert "checkpoint-1 could not be removed ([Errno 13] Permission denied); the next save tries again" in caplog.text
    with caplog.at_level(logging.INFO):
        checkpointer.save(3, parts(3))
    assert checkpointer.steps() == [3]
    assert "removing checkpoint-1: it is beyond the limit" in caplog.text
