"""A process that dies, or a disk that fails, at every single operation of a save."""

import multiprocessing
import shutil
from pathlib import Path
from typing import Any

import ckpt_workers
import pytest
from ckpt_faults import Faults, Killed
from ckpt_parts import listed, parts, restored

from tr_ckpt import Checkpointer, files

# What is there before, the save's step, and the only outcomes (step, number) that are right.
SCENARIOS = {
    "first": ([], 2, {(None, 0), (2, 20)}),
    "next": ([(1, 10)], 2, {(1, 10), (2, 20)}),
    "same step again": ([(1, 10), (2, 11)], 2, {(2, 11), (2, 20)}),
}


# The session `crash` breaks whole runs; of these, every change runs one scenario.
AT_NIGHT = [pytest.param(name, marks=pytest.mark.slow) for name in SCENARIOS if name != "next"]


# How a run saves: without a limit, with one, and in the background.
WAYS = {"all stay": {}, "one stays": {"keep_last": 1}, "in the background": {"keep_last": 1, "asynchronous": True}}


def save(checkpointer: Checkpointer, step: int, number: int) -> None:
    checkpointer.save(step, parts(number), write_extra=lambda folder: (folder / "config.json").write_text("{}"))
    checkpointer.wait()


def prepare(directory: Path, before: list[tuple[int, int]], **options: Any) -> Checkpointer:
    checkpointer = Checkpointer(directory, **options)
    for step, number in before:
        save(checkpointer, step, number)
    return checkpointer


def operations(directory: Path, before: list[tuple[int, int]], step: int, **options: Any) -> int:
    checkpointer = prepare(directory / "counted", before, **options)
    with Faults() as counted:
        save(checkpointer, step, 20)
    checkpointer.close()
    assert len(counted.log) > 20
    return len(counted.log)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("scenario", ["next", *AT_NIGHT])
@pytest.mark.parametrize("mode", ["kill", pytest.param("tear", marks=pytest.mark.slow)])
def test_a_kill_before_any_operation_leaves_the_old_or_the_new_checkpoint(tmp_path, mode, scenario, way, caplog):
    before, step, right = SCENARIOS[scenario]
    outcomes = []
    for at in range(1, operations(tmp_path, before, step, **WAYS[way]) + 1):
        directory = tmp_path / str(at)
        checkpointer = prepare(directory, before, **WAYS[way])
        with Faults(at, mode), pytest.raises(Killed):
            save(checkpointer, step, 20)
        outcomes.append(restored(directory))
        assert outcomes[-1] in right
        assert list(directory.glob("checkpoint-*/config.json")) or outcomes[-1] != (2, 20)
        if way != "all stay":  # the run after it leaves nothing behind
            again = Checkpointer(directory, **WAYS[way])
            again.restore(parts())
            save(again, step + 1, 30)
            again.close()
            assert listed(directory) == [f"checkpoint-{step + 1}"]
            assert restored(directory) == (step + 1, 30)
    assert len(set(outcomes)) == len(right)  # the commit is one of the operations, neither the first nor the last
    assert outcomes == sorted(outcomes, key=lambda outcome: outcome[1])  # and it is one instant


@pytest.mark.slow
def test_a_kill_in_the_clearing_up_after_a_kill_loses_nothing(tmp_path):
    before, step, right = SCENARIOS["same step again"]
    for first in range(1, operations(tmp_path, before, step) + 1):
        for second in (1, 2, 3, 5, 8):
            directory = tmp_path / f"{first}-{second}"
            checkpointer = prepare(directory, before)
            with Faults(first), pytest.raises(Killed):
                save(checkpointer, step, 20)
            with Faults(second), pytest.raises(Killed):
                Checkpointer(directory).save(3, parts(30))
            assert restored(directory) in right


@pytest.mark.parametrize("way", ["one stays", "in the background"])
@pytest.mark.parametrize("mode", [pytest.param("error", marks=pytest.mark.slow), "full"])
@pytest.mark.parametrize("scenario", ["next", *AT_NIGHT])
def test_a_disk_that_fails_at_any_operation_leaves_the_old_or_the_new_checkpoint(tmp_path, scenario, mode, way, caplog):
    before, step, right = SCENARIOS[scenario]
    for at in range(1, operations(tmp_path, before, step, **WAYS[way]) + 1):
        directory = tmp_path / str(at)
        checkpointer = prepare(directory, before, **WAYS[way])
        raised = None
        with Faults(at, mode) as faults:
            try:
                save(checkpointer, step, 20)
            except OSError as error:
                raised = error
        outcome = restored(directory)
        assert outcome in right
        # Either it is there, or the failure was raised; and that is so once.
        assert raised is not None or outcome == (step, 20)
        assert raised is None or "No space left" in str(raised)
        checkpointer.wait()
        left = list(directory.glob(".tmp-*"))
        removing = faults.log[at - 1] in ("remove_file", "remove_folder")
        assert not left or removing or outcome == (step, 20)
        save(checkpointer, step + 1, 30)
        checkpointer.close()  # or the lock of one that is collected later counts as an operation
        assert listed(directory) == [f"checkpoint-{step + 1}"]
        assert restored(directory) == (step + 1, 30)


def test_a_full_disk_is_reported_and_its_temporary_folder_is_removed(tmp_path):
    checkpointer = prepare(tmp_path, [(1, 10)])
    with Faults(12, "full"), pytest.raises(OSError, match="No space left on device"):
        checkpointer.save(2, parts(20))
    assert listed(tmp_path) == ["checkpoint-1"]


@pytest.mark.parametrize("share", [0, 0.5, 1])
def test_a_process_that_really_dies_leaves_the_old_or_the_new_checkpoint(tmp_path, share):
    checkpointer = prepare(tmp_path, [(1, 10)])
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
