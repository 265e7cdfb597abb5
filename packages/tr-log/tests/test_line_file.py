import errno
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tr_log.line_file import LineFile


@pytest.fixture
def path(tmp_path):
    return tmp_path / "deep" / "lines.txt"


def test_lines_are_there_when_append_returns(path):
    file = LineFile(path)
    file.append("one")
    file.append("zwei ü \udc80")
    assert path.read_bytes() == b"one\nzwei \xc3\xbc \\udc80\n"


@pytest.mark.parametrize("torn", [b'{"loss": 0.', b"x" * 200_000])
def test_half_a_line_of_a_crashed_process_is_removed_by_the_next(path, torn):
    LineFile(path).append("one")
    with path.open("ab") as raw:
        raw.write(torn)
    file = LineFile(path)
    assert file.read() == ["one"]
    file.append("two")
    assert path.read_bytes() == b"one\ntwo\n"


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\x85", "\x0b", "\x0c", "\x1c", "\x1d", "\x1e", "\r"])
def test_only_a_line_feed_ends_a_line(path, separator):
    file = LineFile(path)
    file.append(f"one{separator}still one")
    file.append("two")
    assert file.read() == [f"one{separator}still one", "two"]


def test_a_file_that_is_nothing_but_half_a_line_is_started_again(path):
    path.parent.mkdir()
    path.write_bytes(b"half")
    LineFile(path).append("one")
    assert path.read_bytes() == b"one\n"


def test_replaced_lines_leave_no_other_file(path):
    file = LineFile(path)
    file.append("one")
    file.replace(["a", "b"])
    file.append("c")
    assert file.read() == ["a", "b", "c"]
    assert [p.name for p in path.parent.iterdir()] == ["lines.txt"]


def test_two_writers_at_one_time_do_not_meet(path, monkeypatch):
    path.parent.mkdir(parents=True, exist_ok=True)
    replace = Path.replace

    def meanwhile(beside, target):
        monkeypatch.setattr(Path, "replace", replace)
        LineFile(path).replace(["theirs"])
        assert LineFile(path).read() == ["theirs"]
        return replace(beside, target)

    monkeypatch.setattr(Path, "replace", meanwhile)
    file = LineFile(path)
    file.replace(["mine"])
    assert file._whole is None, "it is written, and not kept for later"
    assert file.read() == ["mine"]
    assert [p.name for p in path.parent.iterdir()] == ["lines.txt"]


def test_a_file_that_another_set_aside_meanwhile_is_not_overwritten(path, monkeypatch):
    LineFile(path).append("mine")
    (path.parent / "lines-1.txt").write_text("theirs")
    monkeypatch.setattr(type(path), "glob", lambda self, pattern: iter(()))  # it came after the look
    assert LineFile(path).set_aside().name == "lines-2.txt"
    assert (path.parent / "lines-1.txt").read_text() == "theirs"


def test_a_file_is_set_aside_under_the_next_free_number(path):
    for number in range(3):
        LineFile(path).append(str(number))
        aside = LineFile(path).set_aside()
        assert aside.name == f"lines-{number + 1}.txt"
        assert aside.read_text() == f"{number}\n"
    (path.parent / "lines-old.txt").touch()
    (path.parent / "lines-7.txt").touch()
    LineFile(path).append("more")
    assert LineFile(path).set_aside().name == "lines-8.txt"


def test_nothing_is_set_aside_where_there_is_nothing(path):
    assert LineFile(path).set_aside() is None


def test_a_failure_is_logged_once_and_nothing_is_lost(path, caplog):
    caplog.set_level(logging.INFO)
    path.parent.write_text("a file where the folder should be")
    file = LineFile(path)
    file.append("one")
    file.append("two")
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith(f"cannot write {path}: ")
    assert "training goes on" in caplog.messages[0]
    path.parent.unlink()
    file.append("three")
    assert path.read_text() == "one\ntwo\nthree\n"
    assert caplog.messages[1] == f"{path} can be written again; no entry is missing"


def test_a_replacement_that_failed_comes_before_what_was_appended_after_it(path):
    path.parent.write_text("a file where the folder should be")
    file = LineFile(path)
    file.append("lost to the replacement")
    file.replace(["a"])
    file.append("b")
    path.parent.unlink()
    file.append("c")
    assert path.read_text() == "a\nb\nc\n"


def test_another_kind_of_failure_is_logged_as_well(path, caplog):
    path.parent.write_text("a file where the folder should be")
    file = LineFile(path)
    file.append("one")
    path.parent.unlink()
    path.mkdir(parents=True)
    file.append("two")
    assert len(caplog.messages) == 2


def test_a_failure_after_a_recovery_is_logged_again(path, caplog):
    file = LineFile(path)
    for _ in range(2):
        path.parent.write_text("a file where the folder should be")
        file.append("one")
        path.parent.unlink()
        file.append("two")
        path.unlink()
        path.parent.rmdir()
    assert sum(message.startswith("cannot write") for message in caplog.messages) == 2


def test_what_could_not_be_written_until_the_end_is_counted(path, caplog):
    path.parent.write_text("a file where the folder should be")
    file = LineFile(path)
    file.append("one")
    file.append("two")
    file.close()
    assert "the last 2 entries are not in it" in caplog.messages[-1]
    assert "free space or make the folder writable" in caplog.messages[-1]


@pytest.mark.skipif(sys.platform == "win32", reason="needs a limit on file sizes")
def test_a_disk_that_fills_up_in_the_middle_of_a_line_leaves_whole_lines_only(path):
    code = f"""
import resource
from pathlib import Path
from tr_log.line_file import LineFile
path = Path({str(path)!r})
file = LineFile(path)
file.append("x" * 60)
resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
file.append("y" * 60)
assert path.read_text() == "x" * 60 + "\\n", path.read_text()
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
file.append("z")
assert path.read_text() == "x" * 60 + "\\n" + "y" * 60 + "\\nz\\n", path.read_text()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("cannot write") == 1


@pytest.mark.parametrize(("code", "written"), [(errno.EINVAL, True), (errno.ENOTSUP, True), (errno.EIO, False)])
def test_lines_are_replaced_on_a_file_system_that_syncs_nothing_and_not_on_a_disk_that_fails(
    path, monkeypatch, code, written
):
    def fsync(descriptor):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", fsync)
    file = LineFile(path)
    file.replace(["a", "b"])
    assert path.exists() == written
    monkeypatch.undo()
    file.close()
    assert path.read_text() == "a\nb\n"
