"""Folders that others make at the same time, and files written in blocks."""

import hashlib
import os
import threading

import pytest

from tr_ckpt import files


def test_folders_above_that_are_missing_are_made(tmp_path):
    files.make_folders(tmp_path / "a" / "b" / "c")
    files.make_folders(tmp_path / "a" / "b" / "c")
    assert (tmp_path / "a" / "b" / "c").is_dir()


def test_a_folder_that_somebody_else_makes_meanwhile_is_taken(tmp_path, monkeypatch):
    def make_folder(path):
        path.mkdir()  # the other one
        raise FileExistsError(path)

    monkeypatch.setattr(files, "make_folder", make_folder)
    files.make_folders(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir()


def test_a_file_in_the_place_of_a_folder_is_an_error(tmp_path):
    (tmp_path / "a").write_text("")
    with pytest.raises(FileExistsError):
        files.make_folders(tmp_path / "a")
    with pytest.raises(OSError, match="a"):
        files.make_folders(tmp_path / "a" / "b")


@pytest.mark.parametrize("size", [0, 1, 15, 16, 17, 32, 100])
def test_the_digest_of_a_file_is_that_of_its_bytes_whatever_the_blocks(tmp_path, monkeypatch, size):
    monkeypatch.setattr(files, "BLOCK_BYTES", 16)
    content = bytes(range(200))[:size]
    for number, pieces in enumerate(([content], [content[:7], content[7:]], [content[n : n + 1] for n in range(size)])):
        path = tmp_path / f"file-{number}"
        written = files.write_file(path, pieces)
        assert path.read_bytes() == content
        assert (written.bytes, written.sha256) == (size, hashlib.sha256(content).hexdigest())
        assert files.record(path) == files.seal_file(path) == written


def test_files_are_synced_and_removed_several_at_once(tmp_path, monkeypatch):
    """The barrier lets nobody through who is alone."""
    met = threading.Barrier(2, timeout=60)
    for name in ("sync", "remove_file"):
        operation = getattr(files, name)
        monkeypatch.setattr(files, name, lambda *given, operation=operation: (met.wait(), operation(*given)))
    unsynced = files.Unsynced()
    (tmp_path / "folder").mkdir()
    for number in range(2):
        files.write_file(tmp_path / "folder" / str(number), [b"x"], unsynced=unsynced)
    unsynced.sync()
    files.remove_tree(tmp_path / "folder")
    assert not (tmp_path / "folder").exists()


def test_of_many_files_few_are_open_and_each_is_synced_once(tmp_path, monkeypatch):
    synced, most = [], 0
    monkeypatch.setattr(files, "sync", lambda descriptor, path: (os.fstat(descriptor), synced.append(path)))
    unsynced = files.Unsynced()
    for number in range(150):
        files.write_file(tmp_path / str(number), [b"x"], unsynced=unsynced)
        most = max(most, len(unsynced._held))
    unsynced.sync()
    assert sorted(synced) == sorted(tmp_path.iterdir())
    assert most < 64


def test_a_sync_that_fails_is_raised_and_every_file_is_closed(tmp_path, monkeypatch):
    def fail(descriptor, path):
        raise OSError(5, "Input/output error", str(path))

    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(files, "sync", fail)
    unsynced = files.Unsynced()
    for number in range(3):
        files.write_file(tmp_path / str(number), [b"x"], unsynced=unsynced)
    with pytest.raises(OSError, match="Input/output error"):
        unsynced.sync()
    assert len(os.listdir("/proc/self/fd")) == before


def test_where_no_thread_can_be_started_the_caller_does_all(monkeypatch):
    def refuse(_):
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    done = []
    files.for_each(done.append, range(5))
    assert done == [0, 1, 2, 3, 4]
