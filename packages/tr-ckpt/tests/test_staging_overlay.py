"""Folders that cannot be renamed, as those of a lower layer of overlayfs: replaced, removed, put back."""

import contextlib
import errno
import os
import shutil
from pathlib import Path

import pytest
from ckpt_faults import Faults, Killed, forget_temporaries
from ckpt_parts import listed, number_of, parts, restored

from tr_ckpt import Checkpointer, discovery, files, names
from tr_ckpt.command import main
from tr_ckpt.hub import snapshot


def write_extra(folder):
    (folder / "trainer_state.json").write_text("{}")
    (folder / "deep").mkdir()
    (folder / "deep" / "words.txt").write_text("one")


@pytest.fixture
def lower(monkeypatch):
    """Make all folders that are there by now, and not those made later, ones that cannot be renamed."""
    really, held = os.rename, {}

    def rename(source, target):
        if os.path.isdir(source) and os.stat(source).st_ino in held:
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), str(source), None, str(target))
        really(source, target)

    def lower(directory):
        forget()
        for path in directory.rglob("*"):
            if path.is_dir():  # held open, so that its number is not given to another
                held[os.stat(path).st_ino] = os.open(path, os.O_RDONLY)

    def forget():
        while held:
            os.close(held.popitem()[1])

    monkeypatch.setattr(os, "rename", rename)
    yield lower
    forget()


def prepared(directory: Path, *steps: int) -> Checkpointer:
    checkpointer = Checkpointer(directory, keep_last=2)
    for step in steps:
        checkpointer.save(step, parts(10 * step), write_extra=write_extra)
    return checkpointer


def whole(directory: Path) -> list[tuple[int, int]]:
    """Return step and content of all that count as checkpoints, each read whole; no other looks like one."""
    found = []
    for each in discovery.find(directory, "checkpoint"):
        assert not discovery.is_foreign(each.path)
        if (each.path / names.MANIFEST).exists():
            into = parts()
            found.append((Checkpointer(directory).restore(into, source=each.path), number_of(into)))
    return found


def test_one_beyond_the_limit_is_removed_where_it_is(tmp_path, lower, caplog):
    checkpointer = prepared(tmp_path, 1, 2)
    lower(tmp_path)
    checkpointer.save(3, parts(30), write_extra=write_extra)
    assert listed(tmp_path) == ["checkpoint-2", "checkpoint-3"]
    assert not caplog.records


def test_one_of_the_same_step_is_replaced_where_it_is(tmp_path, lower, caplog):
    checkpointer = prepared(tmp_path, 1, 2)
    lower(tmp_path)
    checkpointer.save(2, parts(21), write_extra=write_extra)
    assert listed(tmp_path) == ["checkpoint-1", "checkpoint-2"]
    assert restored(tmp_path) == (2, 21)
    assert not caplog.records


def saving(step):
    """Return what the save of `step` may leave: before it counts, and from then on."""
    return [
        [(1, 10), (2, 20)],
        *([[(1, 10), (2, 21)]] if step == 2 else [[(1, 10), (2, 20), (3, 21)], [(2, 20), (3, 21)]]),
    ]


def copy_of_lower(base, directory, lower):
    shutil.copytree(base, directory)
    lower(directory)


def resumed(directory):
    checkpointer = Checkpointer(directory, keep_last=2)
    checkpointer.restore(parts())
    return checkpointer


# A Checkpointer that is collected unlocks its folder, which is one of the operations that are struck.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("mode", ["kill", "error"])
@pytest.mark.parametrize("step", [2, 3])
def test_at_no_operation_does_a_half_one_look_whole_or_is_one_lost(tmp_path, lower, mode, step, caplog):
    prepared(tmp_path / "base", 1, 2)
    copy_of_lower(tmp_path / "base", tmp_path / "counted", lower)
    with Faults() as counted:
        resumed(tmp_path / "counted").save(step, parts(21), write_extra=write_extra)
    seen = []
    for at in range(1, len(counted.log) + 1):
        directory = tmp_path / str(at)
        copy_of_lower(tmp_path / "base", directory, lower)
        with Faults(at, mode), contextlib.suppress(Killed, OSError):
            resumed(directory).save(step, parts(21), write_extra=write_extra)
        if whole(directory) not in seen:
            seen.append(whole(directory))
        assert restored(directory) in {(2, 20), (step, 21)}
        resumed(directory).save(4, parts(40))
        assert len(listed(directory)) == 2, listed(directory)
        assert restored(directory) == (4, 40)
    # A process that is killed later has saved more. An error alone has no such order: where only the lock or a leftover
    # fails, the save succeeds.
    assert (seen if mode == "kill" else sorted(seen)) == (saving(step) if mode == "kill" else sorted(saving(step)))


def test_one_that_a_run_was_replacing_counts_where_it_is_though_it_cannot_be_put_back(tmp_path, lower, caplog):
    checkpointer = prepared(tmp_path, 1, 2)
    os.rename(tmp_path / "checkpoint-2", names.temporary(tmp_path, "replaced", "checkpoint-2"))
    forget_temporaries()
    lower(tmp_path)
    assert restored(tmp_path) == (2, 20)
    checkpointer.save(3, parts(30))
    assert checkpointer.steps() == [2, 3]
    checkpointer.save(4, parts(40))  # and it goes as others do
    assert listed(tmp_path) == ["checkpoint-3", "checkpoint-4"]


def test_a_folder_of_another_program_is_not_taken_apart_and_the_error_says_why(tmp_path, lower):
    (tmp_path / "checkpoint-1").mkdir()
    (tmp_path / "checkpoint-1" / "notes.txt").write_text("mine")
    lower(tmp_path)
    with pytest.raises(OSError, match="checkpoint-1 was not saved.*lower layer of a container's file system"):
        Checkpointer(tmp_path).save(1, parts(1))
    assert (tmp_path / "checkpoint-1" / "notes.txt").read_text() == "mine"
    assert listed(tmp_path) == ["checkpoint-1"]


def test_the_rest_of_a_removed_one_stays_if_somebody_put_files_there(tmp_path, lower, caplog):
    checkpointer = prepared(tmp_path, 1, 2)
    lower(tmp_path)
    with Faults() as counted:
        pass
    with Faults() as faults:
        original = files.remove_tree
        try:
            files.remove_tree = lambda path: faults._fail("kill", ()) if path.name == "checkpoint-1" else original(path)
            with pytest.raises(Killed):
                checkpointer.save(3, parts(30))
        finally:
            files.remove_tree = original
    assert counted.log == []
    (tmp_path / "checkpoint-1" / "notes.txt").write_text("mine")
    Checkpointer(tmp_path).save(4, parts(40))
    assert listed(tmp_path) == ["checkpoint-1", "checkpoint-2", "checkpoint-3", "checkpoint-4"]
    assert (tmp_path / "checkpoint-1" / "notes.txt").read_text() == "mine"
    assert "checkpoint-1 stays" in caplog.text


def test_an_exported_model_that_cannot_be_moved_is_not_replaced_in_words(tmp_path, lower, capsys):
    Checkpointer(tmp_path / "run").save(
        1, parts(1), write_extra=lambda folder: (folder / "config.json").write_text("{}")
    )
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "model")]) == 0
    lower(tmp_path)
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "model"), "--overwrite"]) == 2
    assert "is not replaced: it belongs to a lower layer" in capsys.readouterr().err
    assert listed(tmp_path) == ["model", "run"]


@pytest.mark.parametrize("code", [errno.EPERM, errno.EXDEV, errno.EMLINK, errno.ENOTSUP])
def test_files_that_cannot_be_linked_are_copied(tmp_path, monkeypatch, code):
    def link(source, target):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(files, "link", link)
    (tmp_path / "one").write_text("content")
    snapshot.link_files(tmp_path, tmp_path / "copy", ["one"])
    assert (tmp_path / "copy" / "one").read_text() == "content"


def test_a_file_that_somebody_else_puts_there_meanwhile_is_not_written_over(tmp_path, monkeypatch):
    def link(source, target):
        target.write_text("theirs")
        raise FileExistsError(errno.EEXIST, "File exists")

    monkeypatch.setattr(files, "link", link)
    (tmp_path / "one").write_text("content")
    snapshot.link_files(tmp_path, tmp_path / "copy", ["one"])
    assert (tmp_path / "copy" / "one").read_text() == "theirs"
