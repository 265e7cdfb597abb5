"""A process that dies, or a disk that fails, at every single operation of a save."""

import multiprocessing
import shutil
from pathlib import Path

import ckpt_workers
import pytest
from ckpt_faults import Faults, Killed
from ckpt_parts import listed, number_of, parts

from tr_ckpt import Checkpointer, files

# What is there before, the save's step, and the only outcomes (step, number) that are right.
SCENARIOS = {
    "first": ([], 2, {(None, 0), (2, 20)}),
    "next": ([(1, 10)], 2, {(1, 10), (2, 20)}),
    "same step again": ([(1, 10), (2, 11)], 2, {(2, 11), (2, 20)}),
}


def prepare(directory: Path, before: list[tuple[int, int]], keep_last: int | None) -> Checkpointer:
    checkpointer = Checkpointer(directory, keep_last=keep_last)
    for step, number in before:
        checkpointer.save(step, parts(number))
    return checkpointer


def operations(directory: Path, before: list[tuple[int, int]], step: int, keep_last: int | None) -> int:
    checkpointer = prepare(directory / "counted", before, keep_last)
    with Faults() as counted:
        checkpointer.save(step, parts(20), write_extra=write_extra)
    return len(counted.log)


def write_extra(folder: Path) -> None:
    (folder / "config.json").write_text("{}")


def restored(directory: Path) -> tuple[int | None, int]:
    into = parts()
    step = Checkpointer(directory).restore(into)
    return step, number_of(into)


@pytest.mark.parametrize("keep_last", [None, 1])
@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("mode", ["kill", "tear"])
def test_a_kill_before_any_operation_leaves_the_old_or_the_new_checkpoint(tmp_path, mode, scenario, keep_last):
    before, step, right = SCENARIOS[scenario]
    total = operations(tmp_path, before, step, keep_last)
    assert total > 20
    outcomes = []
    for at in range(1, total + 1):
        directory = tmp_path / str(at)
        checkpointer = prepare(directory, before, keep_last)
        with Faults(at, mode), pytest.raises(Killed):
            checkpointer.save(step, parts(20), write_extra=write_extra)
        outcomes.append(restored(directory))
        assert outcomes[-1] in right
        assert list(directory.glob("checkpoint-*/config.json")) or outcomes[-1][0] != 2 or outcomes[-1][1] != 20
    assert len(set(outcomes)) == len(right)  # the commit is one of the operations, neither the first nor the last
    assert outcomes == sorted(outcomes, key=lambda outcome: outcome[1])  # and it is one instant


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_the_run_after_a_kill_saves_and_leaves_nothing_behind(tmp_path, scenario):
    before, step, _ = SCENARIOS[scenario]
    for at in range(1, operations(tmp_path, before, step, 1) + 1):
        directory = tmp_path / str(at)
        checkpointer = prepare(directory, before, 1)
        with Faults(at), pytest.raises(Killed):
            checkpointer.save(step, parts(20), write_extra=write_extra)
        again = Checkpointer(directory, keep_last=1)
        again.restore(parts())
        again.save(step + 1, parts(30))
        assert listed(directory) == [f"checkpoint-{step + 1}"]
        assert restored(directory) == (step + 1, 30)


def test_a_kill_in_the_clearing_up_after_a_kill_loses_nothing(tmp_path):
    before, step, right = SCENARIOS["same step again"]
    for first in range(1, operations(tmp_path, before, step, None) + 1):
        for second in (1, 2, 3, 5, 8):
            directory = tmp_path / f"{first}-{second}"
            checkpointer = prepare(directory, before, None)
            with Faults(first), pytest.raises(Killed):
                checkpointer.save(step, parts(20), write_extra=write_extra)
            with Faults(second), pytest.raises(Killed):
                Checkpointer(directory).save(3, parts(30))
            assert restored(directory) in right


@pytest.mark.parametrize("mode", ["error", "full"])
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_disk_that_fails_at_any_operation_leaves_the_old_or_the_new_checkpoint(tmp_path, scenario, mode, caplog):
    before, step, right = SCENARIOS[scenario]
    for at in range(1, operations(tmp_path, before, step, 1) + 1):
        directory = tmp_path / str(at)
        checkpointer = prepare(directory, before, 1)
        raised = None
        with Faults(at, mode) as faults:
            try:
                checkpointer.save(step, parts(20), write_extra=write_extra)
            except OSError as error:
                raised = error
        outcome = restored(directory)
        assert outcome in right
        assert raised is not None or outcome == (step, 20)
        assert raised is None or "No space left" in str(raised)
        left = list(directory.glob(".tmp-*"))
        removing = faults.log[at - 1] in ("remove_file", "remove_folder")
        assert not left or removing or outcome == (step, 20)
        checkpointer.save(step + 1, parts(30))
        assert listed(directory) == [f"checkpoint-{step + 1}"]


def test_a_full_disk_is_reported_and_its_temporary_folder_is_removed(tmp_path):
    checkpointer = prepare(tmp_path, [(1, 10)], None)
    with Faults(12, "full"), pytest.raises(OSError, match="No space left on device"):
        checkpointer.save(2, parts(20))
    assert listed(tmp_path) == ["checkpoint-1"]


@pytest.mark.parametrize("share", [0, 0.5, 1])
def test_a_process_that_really_dies_leaves_the_old_or_the_new_checkpoint(tmp_path, share):
    checkpointer = prepare(tmp_path, [(1, 10)], None)
    checkpointer.close()
    with Faults() as counted:
        checkpointer.save(2, parts(20))
    checkpointer.close()
    shutil.rmtree(checkpointer.path(2))
    at = max(1, round(share * len(counted.log)))
    context = multiprocessing.get_context("forkserver")
    child = context.Process(target=ckpt_workers.save_and_die, args=(str(tmp_path), at))
    child.start()
    child.join(60)
    assert child.exitcode == ckpt_workers.DIED
    assert restored(tmp_path) in {(1, 10), (2, 20)}
    Checkpointer(tmp_path).save(3, parts(30))
    assert not list(tmp_path.glob(".tmp-*"))


def test_the_first_save_waits_for_the_names_of_all_folders_above_whoever_made_them(tmp_path, monkeypatch):
    """A logger that made the run's folder has synced nothing: a power cut would take the checkpoint with it."""
    synced = []
    sync_folder = files.sync_folder
    monkeypatch.setattr(files, "sync_folder", lambda path: (synced.append(path), sync_folder(path)))
    (tmp_path / "a" / "run").mkdir(parents=True)
    checkpointer = Checkpointer(tmp_path / "a" / "run")
    checkpointer.save(1, parts(10))
    assert synced[:2] == [tmp_path / "a", tmp_path]
    synced.clear()
    checkpointer.save(2, parts(20))
    assert tmp_path not in synced
    assert tmp_path / "a" not in synced


def test_a_folder_above_that_may_not_be_read_is_passed_over(tmp_path, monkeypatch):
    sync_folder, refused = files.sync_folder, []

    def sync(path):
        if path == tmp_path:
            refused.append(path)
            raise PermissionError(13, "Permission denied")
        sync_folder(path)

    monkeypatch.setattr(files, "sync_folder", sync)
    assert Checkpointer(tmp_path / "a" / "run").save(1, parts(10)).exists()
    assert refused == [tmp_path]


def test_an_old_checkpoint_has_lost_its_name_for_good_before_its_files_go(tmp_path):
    """Or a power cut could leave a folder of that name without half of them."""
    checkpointer = Checkpointer(tmp_path, keep_last=1)
    checkpointer.save(1, parts(10))
    with Faults() as counted:
        checkpointer.save(2, parts(20))
    first = counted.log.index("remove_file")
    assert counted.log[first - 2 : first] == ["rename", "sync_folder"]
