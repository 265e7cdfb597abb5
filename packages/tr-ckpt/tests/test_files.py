"""Folders that others make at the same time, and files written in blocks."""

import hashlib

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


def test_a_file_of_several_real_blocks_has_the_digest_of_its_bytes(tmp_path):
    content = b"".join(bytes([number]) * files.BLOCK_BYTES for number in (1, 2)) + b"rest"
    written = files.write_file(tmp_path / "file", [content])
    assert (written.bytes, written.sha256) == (len(content), hashlib.sha256(content).hexdigest())
    moved = content[files.BLOCK_BYTES : 2 * files.BLOCK_BYTES] + content[: files.BLOCK_BYTES] + b"rest"
    (tmp_path / "moved").write_bytes(moved)
    assert files.record(tmp_path / "file") == written
    assert files.record(tmp_path / "moved") != written
