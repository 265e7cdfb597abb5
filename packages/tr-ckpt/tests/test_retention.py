"""Old checkpoints go, the right ones, and only when the new one is safe."""

import logging

import pytest
from ckpt_faults import Faults
from ckpt_parts import parts

from tr_ckpt import Checkpointer, catalogue, files, retention
from tr_ckpt.errors import DamagedCheckpointError

STEPS = (5, 10, 15, 20, 25)

# Saved in this order, what stays with a limit, protected steps, and steps that stay for ever.
CASES = [
    (STEPS, 2, (5,), None, [5, 25]),  # the best of a run and its last, as save_total_limit counts them
    (STEPS, 1, (5,), None, [5, 25]),
    (STEPS, 3, (5,), None, [5, 20, 25]),
    (STEPS, 3, (), None, [15, 20, 25]),
    (STEPS, 1, (), None, [25]),
    (STEPS, 9, (), None, STEPS),
    (STEPS, 1, (25,), None, [25]),
    (STEPS, 1, (5, 10), None, [5, 10, 25]),
    (STEPS, 1, (99,), None, [25]),
    (STEPS, 1, (), 10, [10, 20, 25]),
    (STEPS, 2, (), 10, [10, 15, 20, 25]),
    (STEPS, 3, (), 10, STEPS),
    (STEPS, 1, (5,), 10, [5, 10, 20, 25]),
    (STEPS, 1, (10,), 10, [10, 20, 25]),
    (STEPS, 1, (), 5, STEPS),
    (STEPS, 1, (), 25, [20, 25]),  # the newest stays for ever, so one more is kept
    (STEPS, 1, (), 1000, [25]),
    ((0, 1, 2), 1, (), 10, [0, 2]),
    ((10, 20, 30, 12), 2, (), None, [12, 30]),  # went back to 10: what is old is what was saved early
    ((10, 20, 30, 12), 1, (), None, [12]),
    ((10, 20, 30, 12, 14), 2, (), None, [12, 14]),
    ((10, 20, 30, 12, 14), 2, (20,), None, [14, 20]),
    ((10, 20, 30, 12, 14), 1, (), 30, [14, 30]),
    ((100, 200, 5), 2, (), None, [5, 200]),  # a fresh run where an earlier one was
]


@pytest.mark.parametrize(("saved", "limit", "protected", "every", "kept"), CASES)
def test_what_is_to_go_is_old_and_neither_newest_nor_protected_nor_kept_for_ever(
    saved, limit, protected, every, kept, tmp_path
):
    for step in saved:
        Checkpointer(tmp_path).save(step, parts(step))
    arguments = (tmp_path, "checkpoint", limit, saved[-1], protected, every)
    going = [found.step for found in retention.superfluous(*arguments)]
    assert sorted(set(saved) - set(going)) == sorted(kept)
    assert going == [step for step in saved if step not in kept]  # the oldest first


@pytest.mark.parametrize(
    ("saved", "limit", "protected", "kept"),
    [(saved, limit, protected, kept) for saved, limit, protected, every, kept in CASES if every is None],
)
def test_a_limit_kept_at_every_save_ends_with_the_same_checkpoints(saved, limit, protected, kept, tmp_path):
    checkpointer = Checkpointer(tmp_path, keep_last=limit)
    for step in saved:
        checkpointer.save(step, parts(step), protected=protected)
    assert checkpointer.steps() == sorted(kept)


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
    assert counted.log[first - 2 : first] == ["rename", "sync_folder"]  # the old one's, out of the way
    assert counted.log[first - 4 : first - 2] == ["rename", "sync_folder"]  # the new one's, before


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
