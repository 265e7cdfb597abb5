"""A file system that syncs no folders, or nothing at all, holds checkpoints, and what that means is said once."""

import errno
import logging
import os
import stat
from types import SimpleNamespace

import pytest
from ckpt_parts import listed, number_of, parts

from tr_ckpt import Checkpointer, files

UNSUPPORTED = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS)


@pytest.fixture(autouse=True)
def nothing_said_yet(monkeypatch):
    monkeypatch.setattr(files, "_warned", set())


@pytest.fixture
def fail(monkeypatch):
    """Have fsync fail for folders, for files, or for both."""

    def fail(code, *, folders=True, of_files=False):
        def fsync(descriptor):
            is_folder = stat.S_ISDIR(os.fstat(descriptor).st_mode)
            if folders if is_folder else of_files:
                raise OSError(code, os.strerror(code))

        monkeypatch.setattr(os, "fsync", fsync)

    return fail


def saved_and_restored(folder):
    checkpointer = Checkpointer(folder, keep_last=2)
    for step in (1, 2, 3, 3):
        checkpointer.save(step, parts(step))
    into = parts()
    assert listed(folder) == ["checkpoint-2", "checkpoint-3"]
    return Checkpointer(folder).restore(into), number_of(into)


@pytest.mark.parametrize("code", [*UNSUPPORTED, errno.EBADF, errno.EISDIR])
def test_where_folders_cannot_be_synced_checkpoints_are_kept_and_one_warning_says_what_that_means(
    tmp_path, fail, caplog, code
):
    fail(code)
    assert saved_and_restored(tmp_path / "run") == (3, 3)
    [said] = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert "cannot be synced on this file system" in said
    assert str(tmp_path) in said
    assert os.strerror(code) in said
    assert "after a power cut the newest checkpoints may be missing" in said
    assert "killed loses nothing" in said


@pytest.mark.parametrize("code", UNSUPPORTED)
def test_where_files_cannot_be_synced_it_is_said_that_they_may_be_damaged(tmp_path, fail, caplog, code):
    fail(code, folders=False, of_files=True)
    assert saved_and_restored(tmp_path / "run") == (3, 3)
    [said] = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert f"files in {tmp_path}" in said
    assert "may be damaged, which a restore notices" in said


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.ESTALE])
@pytest.mark.parametrize("folders", [True, False])
def test_a_disk_that_fails_to_sync_is_an_error_that_names_what(tmp_path, fail, code, folders):
    (tmp_path / "run").mkdir()
    fail(code, folders=folders, of_files=not folders)
    with pytest.raises(OSError, match=rf"checkpoint-1 was not saved in .*{os.strerror(code)} \(/.* — ") as raised:
        Checkpointer(tmp_path / "run").save(1, parts(1))
    assert raised.value.errno == code
    assert listed(tmp_path / "run") == []


def test_a_bad_descriptor_of_a_file_is_no_missing_feature(tmp_path, fail):
    fail(errno.EBADF, folders=False, of_files=True)
    with pytest.raises(OSError, match="was not saved"):
        Checkpointer(tmp_path).save(1, parts(1))


@pytest.mark.parametrize("code", [errno.EACCES, errno.ENOTSUP, errno.EINVAL])
def test_folders_that_cannot_be_opened_but_listed_are_kept_unsynced(tmp_path, monkeypatch, caplog, code):
    really = os.open

    def opened(path, flags, *more, **options):
        if os.path.isdir(path) and not flags & os.O_CREAT:
            raise OSError(code, os.strerror(code), str(path))
        return really(path, flags, *more, **options)

    monkeypatch.setattr(os, "open", opened)
    assert saved_and_restored(tmp_path / "run") == (3, 3)
    assert len([record for record in caplog.records if "cannot be synced" in record.message]) == 1


def test_a_folder_that_may_not_be_read_is_an_error(tmp_path, monkeypatch):
    def refused(path, *_):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(os, "listdir", refused)
    error = PermissionError(errno.EACCES, "Permission denied")
    assert not files.is_sync_unsupported(error, tmp_path, of_folder=True)
    assert error.filename == str(tmp_path)


@pytest.mark.parametrize(("strategy", "rank", "times"), [("steps", 0, 1), ("steps", 1, 0), ("no", 0, 0)])
def test_it_is_noticed_when_a_run_begins_whether_its_folder_is_there_or_not(
    tmp_path, fail, caplog, strategy, rank, times
):
    fail(errno.EINVAL)
    args = SimpleNamespace(output_dir=str(tmp_path / "a" / "run"), save_total_limit=None, save_strategy=strategy)
    collectives = SimpleNamespace(rank=rank, world_size=2, gather_objects=lambda value: [value, value])
    Checkpointer.from_arguments(args, collectives)
    Checkpointer.from_arguments(args, collectives)
    assert [record.message.split(" on this")[0] for record in caplog.records] == [
        f"{tmp_path} cannot be synced"
    ] * times
    assert not (tmp_path / "a").exists()


def test_what_is_noticed_at_the_beginning_is_no_error_of_the_disk(tmp_path, fail, caplog):
    fail(errno.EIO)
    files.warn_if_unsynced(tmp_path / "a")
    assert caplog.records == []
