"""Old checkpoints go, the right ones, and only when the new one is safe."""

import errno
import logging
import shutil

import pytest
from ckpt_faults import BadReads, Faults
from ckpt_parts import flip, number_of, parts, rewritten, save_steps

from tr_ckpt import Checkpointer, DamagedCheckpointError, discovery, files, reads, retention
from tr_ckpt.errors import Damage

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
    complete = [found for _, found in retention.complete(tmp_path, "checkpoint")]
    going = [found.step for found in retention.superfluous(complete, limit, saved[-1], protected, every)]
    assert sorted(set(saved) - set(going)) == sorted(kept)
    assert going == [step for step in saved if step not in kept]  # the oldest first
    if every is None:  # a limit that is kept at every save ends with the same checkpoints
        checkpointer = Checkpointer(tmp_path / "run", keep_last=limit)
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
    goes_on = Checkpointer(tmp_path, keep_last=2)
    assert goes_on.restore(parts()) == 3
    goes_on.save(4, parts(4))
    assert checkpointer.steps() == [3, 4]
    assert checkpointer.path(2).is_dir()
    assert checkpointer.path(0).is_dir()


def test_nothing_is_removed_when_the_new_one_reads_back_damaged(tmp_path, monkeypatch, caplog):
    checkpointer = Checkpointer(tmp_path, keep_last=1)
    checkpointer.save(1, parts(1))
    asked = []

    def damages(folder, described, wanted):
        asked.append(folder.name)
        return [Damage("model.json", "content", "model.json was changed")]

    monkeypatch.setattr(discovery, "damages", damages)
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
    with caplog.at_level(logging.DEBUG):
        checkpointer.save(3, parts(3))
    assert checkpointer.steps() == [3]
    assert "removing checkpoint-1: it is beyond the limit" in caplog.text


@pytest.fixture
def earlier(tmp_path):
    """What a run before this one left: steps 10, 20 and 30."""
    save_steps(tmp_path)
    return tmp_path


def test_a_run_that_resumed_removes_what_is_no_newer_than_that_and_what_it_saved(earlier):
    keeper = Checkpointer(earlier, keep_last=2)
    assert keeper.restore(parts()) == 30
    for step, kept in ((40, [30, 40]), (50, [40, 50])):
        keeper.save(step, parts(step))
        assert keeper.steps() == kept


def test_a_fresh_run_leaves_what_others_saved_and_says_so_once(earlier, caplog):
    keeper = Checkpointer(earlier, keep_last=2)
    for step in (1, 2, 3, 4):
        keeper.save(step, parts(step))
    assert keeper.steps() == [3, 4, 10, 20, 30]
    [record] = caplog.records
    assert record.getMessage() == (
        "checkpoint-10, checkpoint-20, checkpoint-30 stay whatever the limit: this run neither saved them nor resumed "
        f"from them or a newer one; `trainer ckpt prune {earlier}` removes those that are not needed"
    )


def test_a_fresh_run_with_a_limit_that_is_not_passed_says_nothing(earlier, caplog):
    Checkpointer(earlier, keep_last=4).save(1, parts(1))
    assert not caplog.records


def test_what_was_skipped_as_damaged_stays_whatever_the_limit(earlier):
    flip(earlier / "checkpoint-30" / "model.safetensors", -3)  # its size is right, so that it looks complete
    keeper = Checkpointer(earlier, keep_last=1)
    assert keeper.restore(parts()) == 20
    for step in (21, 22, 23):
        keeper.save(step, parts(step))
    assert keeper.steps() == [23, 30]


def test_what_is_newer_than_a_checkpoint_that_was_named_stays(earlier):
    keeper = Checkpointer(earlier, keep_last=1)
    assert keeper.restore(parts(), earlier / "checkpoint-20") == 20
    for step in (21, 22):
        keeper.save(step, parts(step))
    assert keeper.steps() == [22, 30]


def test_what_another_run_saves_meanwhile_stays(earlier):
    keeper, other = Checkpointer(earlier, keep_last=1), Checkpointer(earlier)
    assert keeper.restore(parts()) == 30
    other.save(31, parts(31))
    keeper.save(32, parts(32))
    keeper.save(33, parts(33))
    assert keeper.steps() == [31, 33]


def test_a_run_that_resumed_from_elsewhere_leaves_what_is_in_its_folder(earlier, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    shutil.copytree(earlier / "checkpoint-30", elsewhere / "checkpoint-30")
    keeper = Checkpointer(earlier, keep_last=1)
    assert keeper.restore(parts(), elsewhere) == 30
    keeper.save(40, parts(40))
    keeper.save(50, parts(50))
    assert keeper.steps() == [10, 20, 30, 50]


def test_a_folder_that_is_named_by_another_path_is_the_runs_own(earlier, tmp_path_factory):
    link = tmp_path_factory.mktemp("links") / "link"
    link.symlink_to(earlier)
    keeper = Checkpointer(earlier, keep_last=1)
    assert keeper.restore(parts(), link / "checkpoint-30") == 30
    keeper.save(40, parts(40))
    assert keeper.steps() == [40]


def test_a_restore_that_failed_verifies_nothing(earlier):
    keeper = Checkpointer(earlier, keep_last=1)
    flip(earlier / "checkpoint-30" / "model.safetensors", -3)
    with pytest.raises(DamagedCheckpointError):
        keeper.restore(parts(), earlier / "checkpoint-30")
    keeper.save(40, parts(40))
    assert keeper.steps() == [10, 20, 30, 40]


@pytest.mark.parametrize("where", ["checkpoint-20", "checkpoint-20/manifest.json", "checkpoint-20/model.json"])
def test_one_that_cannot_be_read_now_stays_and_the_next_save_looks_again(where, earlier, monkeypatch):
    monkeypatch.setattr(reads, "DELAYS_S", (0.001,))
    keeper = Checkpointer(earlier, keep_last=1)
    keeper.restore(parts())
    keeper.save(40, parts(40), protected=(10, 20, 30))  # so that its age is known
    originals = retention.complete

    def complete(*arguments):
        with BadReads(where=where):
            return originals(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(retention, "complete", complete)
        keeper.save(50, parts(50))
    assert (earlier / "checkpoint-20" / "manifest.json").exists()
    keeper.save(60, parts(60))
    assert keeper.steps() == [60]


@pytest.mark.parametrize("where", ["", "checkpoint-40", "checkpoint-40/extra.json"])
def test_nothing_is_removed_while_the_new_one_cannot_be_read_back(where, earlier, monkeypatch, caplog):
    keeper = Checkpointer(earlier, keep_last=1)
    keeper.restore(parts())
    original = discovery.damages

    def damages(folder, described, wanted):
        with BadReads(where=where) as bad:
            try:
                return original(folder, described, wanted)
            finally:
                assert bad.failed == 1  # the save does not wait for it

    with monkeypatch.context() as patched:
        patched.setattr(discovery, "damages", damages)
        keeper.save(40, parts(40))
    assert keeper.steps() == [10, 20, 30, 40]
    assert "nothing is removed now, the next save tries again: " in caplog.text
    assert "damaged" not in caplog.text
    keeper.save(50, parts(50))
    assert keeper.steps() == [50]


@pytest.mark.parametrize("source", ["own", "named"])
def test_a_momentary_error_while_looking_for_what_to_resume_from_deletes_nothing(source, tmp_path, monkeypatch):
    """What once began at step 0 and then removed a thousand good steps."""
    monkeypatch.setattr(reads, "DELAYS_S", (0.001,))
    for step in (800, 900, 1000):
        Checkpointer(tmp_path).save(step, parts(step))
    with BadReads(after=10**9) as counted:
        Checkpointer(tmp_path).restore(parts())
    for lasting in (False, True):
        for after in range(0, len(counted.log), 7):
            keeper, into = Checkpointer(tmp_path, keep_last=1), parts()
            try:
                with BadReads(times=0 if lasting else 1, after=after):
                    keeper.restore(into, tmp_path if source == "named" else None)
            except reads.UnreadableError:
                assert lasting
            else:
                assert number_of(into) == 1000
            assert keeper.steps() == [800, 900, 1000]


def test_the_reads_of_a_save_are_no_more_than_two_a_file_and_checkpoint(earlier):
    keeper = Checkpointer(earlier, keep_last=3)
    keeper.restore(parts())
    with BadReads(errno.EIO, after=10**9) as counted:
        keeper.save(40, parts(40))
    opened = counted.log.count("open_file")
    assert opened <= 2 * 4 + 5 + 1  # each manifest for the sequence and the limit, and the new checkpoint read back


def reads_of_a_save(directory, number, **options):
    keeper = Checkpointer(directory, **options)
    for step in range(number):
        shutil.copytree(directory / "checkpoint-1000000", directory / f"checkpoint-{step}")
        rewritten(directory / f"checkpoint-{step}", step=step, sequence=step + 2)
    keeper._known.restored = (10**6, 0)  # as if it had resumed from a newer one
    keeper.save(10**6 + 1, parts(1))
    with BadReads(errno.EIO, after=10**9) as counted:
        keeper.save(10**6 + 2, parts(2))
    return counted.log.count("open_file")


@pytest.mark.parametrize("limit", [None, 20])
def test_a_save_opens_as_many_files_whatever_the_number_of_kept_checkpoints(tmp_path, limit):
    opened = []
    for number in (30, 90):
        directory = tmp_path / str(number)
        Checkpointer(directory).save(10**6, parts(1))
        opened.append(reads_of_a_save(directory, number, keep_last=limit))
    assert opened[0] == opened[1]


def test_one_that_is_exchanged_during_the_run_is_read_again_and_the_next_save_is_newer(tmp_path):
    keeper, other = Checkpointer(tmp_path / "run"), Checkpointer(tmp_path / "other")
    for step in (1, 2):
        keeper.save(step, parts(step))
    for _ in range(9):
        other.save(1, parts(9))
    shutil.rmtree(keeper.path(1))
    shutil.copytree(other.path(1), keeper.path(1))
    keeper.save(3, parts(3))
    assert discovery.by_age(tmp_path / "run", "checkpoint")[-1].step == 3


def test_one_that_loses_a_file_during_the_run_counts_no_longer(tmp_path):
    keeper = Checkpointer(tmp_path, keep_last=20)
    for step in range(20):
        keeper.save(step, parts(step))
    (keeper.path(2) / "model.json").unlink()
    keeper.save(20, parts(20))
    assert keeper.steps() == [step for step in range(21) if step != 2]
    keeper.save(21, parts(21))
    assert keeper.steps() == [step for step in range(1, 22) if step != 2]
