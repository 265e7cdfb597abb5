"""Temporary folders: whose they are, and when they go."""

import errno
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from ckpt_faults import Faults, Killed
from ckpt_parts import listed, number_of, parts, restored

from tr_ckpt import Checkpointer, files, processes
from tr_ckpt.command import main


def leave(directory, kind, *, host=None, pid=None, target="checkpoint-1"):
    """Make a temporary folder as another process would have left it."""
    folder = directory / f".tmp-{kind}-{target}@{host or socket.gethostname()}@{pid or os.getpid()}@0a1b2c3d"
    folder.mkdir(parents=True)
    (folder / "half").write_bytes(b"x")
    return folder


def dead_pid():
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        child.wait()
    return child.pid


@pytest.mark.parametrize("kind", ["writing", "removed", "replaced", "pushing"])
def test_what_a_dead_process_left_is_cleared_at_the_next_save(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "STILL_S", 0.0)
    Checkpointer(tmp_path).save(1, parts(1))
    folders = [leave(tmp_path, kind, pid=dead_pid()), leave(tmp_path, kind, host="gone"), leave(tmp_path, kind)]
    Checkpointer(tmp_path).save(2, parts(2))
    assert not any(folder.exists() for folder in folders)
    assert Checkpointer(tmp_path).steps() == [1, 2]


def test_what_a_living_process_works_on_stays(tmp_path):
    folder = leave(tmp_path, "writing", pid=os.getppid())
    ours = processes.temporary(tmp_path, "pushing", "checkpoint")
    ours.mkdir()
    Checkpointer(tmp_path).save(2, parts(2))
    assert folder.is_dir()
    assert ours.is_dir()
    processes.release(ours)
    Checkpointer(tmp_path).save(3, parts(3))
    assert not ours.exists()


def test_what_another_machine_works_on_stays_until_nothing_changes_there(tmp_path, monkeypatch):
    folder = leave(tmp_path, "writing", host="elsewhere", target="export")
    checkpointer = Checkpointer(tmp_path)
    checkpointer.claim()
    monkeypatch.setattr(processes, "STILL_S", 1e-9)  # so that each look finds what did not change since the last
    for step, change in enumerate((
        lambda: (folder / "half").write_bytes(b"xx"),
        lambda: (folder / "deep").mkdir(),
        lambda: (folder / "deep" / "file").write_bytes(b""),
        lambda: os.utime(folder, ns=(1, 1)),
    )):  # fmt: skip
        change()
        checkpointer.save(step, parts(1))
        assert folder.is_dir()
    checkpointer.save(9, parts(1))
    assert not folder.exists()


def test_what_another_machine_left_is_watched_from_the_claim_on(tmp_path, monkeypatch):
    folder = leave(tmp_path, "writing", host="elsewhere")
    monkeypatch.setattr(processes, "STILL_S", 1e-9)
    Checkpointer(tmp_path).save(1, parts(1))
    assert not folder.exists()


def test_who_works_on_a_folder_shows_it_to_other_machines(tmp_path):
    ours = processes.temporary(tmp_path, "pushing", "checkpoint")
    ours.mkdir()
    os.utime(ours, ns=(1, 1))
    processes.show_life()
    assert ours.stat().st_mtime_ns > 1
    processes.release(ours)
    os.utime(ours, ns=(1, 1))
    processes.show_life()
    assert ours.stat().st_mtime_ns == 1


def test_a_folder_of_a_machine_before_its_restart_is_cleared_whoever_has_the_number_now(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "STILL_S", 0.0)
    ours = processes.temporary(tmp_path, "writing", "checkpoint-1")
    processes.release(ours)
    process = processes.this_process()
    assert f"@{process.host}@{process.pid}.{process.numbering}@" in ours.name
    own, parent = f"@{process.pid}.", f"@{os.getppid()}."
    living = tmp_path / ours.name.replace(own, parent)
    before_restart = tmp_path / living.name.replace(process.numbering, "0a1b2c3d")
    for folder in (living, before_restart):
        folder.mkdir()
    Checkpointer(tmp_path).save(2, parts(2))
    assert living.is_dir()
    assert not before_restart.exists()


def test_what_is_in_use_stays_when_the_machine_is_renamed(tmp_path, monkeypatch):
    ours = processes.temporary(tmp_path, "pushing", "checkpoint")
    ours.mkdir()
    monkeypatch.setattr(socket, "gethostname", lambda: "renamed")
    Checkpointer(tmp_path).save(2, parts(2))
    assert ours.is_dir()
    processes.release(ours)


@pytest.mark.skipif(not hasattr(os, "setuid"), reason="needs users")
def test_files_that_were_added_read_only_are_synced(tmp_path):
    """A copy of a file in a cache keeps its mode; this user cannot open it for writing, and root could."""
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "config.json").chmod(0o444)
    tmp_path.chmod(0o755)
    script = (
        "import os, sys; from pathlib import Path; from tr_ckpt import files\n"
        "if os.getuid() == 0: os.setuid(65534)\n"
        "print(files.seal_file(Path('config.json')).bytes)"
    )
    command = [sys.executable, "-W", "ignore", "-c", script]
    told = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert told.stdout == "2\n", told.stderr


def test_folders_of_other_names_stay(tmp_path):
    for name in (".tmp-mine", ".tmp-writing-checkpoint-1", "tmp", ".git"):
        (tmp_path / name).mkdir()
    Checkpointer(tmp_path).save(2, parts(2))
    assert len(list(tmp_path.iterdir())) == 5


def test_two_runs_that_save_to_one_folder_are_told(tmp_path, caplog):
    mine, other = Checkpointer(tmp_path), Checkpointer(tmp_path)
    for step in (1, 2):
        mine.save(step, parts(1))
    assert not caplog.records
    other.save(1, parts(2))
    mine.save(3, parts(1))
    assert f"{tmp_path} holds checkpoints that were saved since this run's last one, and not by it" in caplog.text
    caplog.clear()
    mine.save(4, parts(1))
    assert not caplog.records


@pytest.fixture
def half_replaced(tmp_path):
    """A run that was killed between taking the old checkpoint of a step away and putting the new one there."""
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, parts(10))
    checkpointer.save(2, parts(20))
    at = 0
    while True:
        at += 1
        with Faults(at), pytest.raises(Killed):
            checkpointer.save(2, parts(21))
        if not (tmp_path / "checkpoint-2").exists():
            return checkpointer


def test_a_checkpoint_that_was_being_replaced_is_found_without_changing_anything(half_replaced):
    before = listed(half_replaced.directory)
    into = parts()
    assert half_replaced.steps() == [1, 2]
    assert half_replaced.restore(into) == 2
    assert number_of(into) == 20
    assert (half_replaced.path(2) / "manifest.json").exists()
    assert half_replaced.path(3).name == "checkpoint-3"
    assert listed(half_replaced.directory) == before


def test_a_checkpoint_that_was_being_replaced_is_put_back_at_the_next_save(half_replaced, caplog):
    Checkpointer(half_replaced.directory).save(3, parts(30))
    assert "restored checkpoint-2: a run ended while it was replacing it" in caplog.text
    assert listed(half_replaced.directory) == [f"checkpoint-{n}" for n in (1, 2, 3)]
    into = parts()
    half_replaced.restore(into, half_replaced.path(2))
    assert number_of(into) == 20


def test_a_checkpoint_whose_place_somebody_else_took_is_not_removed(half_replaced):
    (half_replaced.directory / "checkpoint-2").mkdir()
    Checkpointer(half_replaced.directory).save(3, parts(30))
    [waiting] = half_replaced.directory.glob(".tmp-replaced-checkpoint-2@*")
    into = parts()
    half_replaced.restore(into, waiting)
    assert number_of(into) == 20


def test_a_restore_works_where_nothing_can_be_written(half_replaced):
    half_replaced.directory.chmod(0o555)
    try:
        with Faults(1, "kill"):
            assert Checkpointer(half_replaced.directory).restore(parts()) == 2
    finally:
        half_replaced.directory.chmod(0o755)


def test_removing_a_tree_does_not_follow_links(tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").touch()
    inside = tmp_path / "inside"
    inside.mkdir()
    (inside / "link").symlink_to(outside)
    (tmp_path / "alias").symlink_to(outside)
    files.remove_tree(inside)
    files.remove_tree(tmp_path / "alias")
    assert (outside / "file").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["outside"]


def test_every_file_is_synced_and_the_manifest_written_last(tmp_path):
    synced = []

    class Watching(Faults):
        def _guarded(self, name, original):
            counted = super()._guarded(name, original)

            def operation(*arguments):
                if name in ("create", "sync_folder", "rename", "make_folder"):
                    synced.append((name, *(path.name.split("@")[0] for path in arguments)))
                return counted(*arguments)

            return operation

    with Watching() as watching:
        checkpointer = Checkpointer(tmp_path / "new")
        checkpointer.save(1, parts(1))
    temporary = ".tmp-writing-checkpoint-1"
    assert synced.pop(1) == ("create", ".tmp-lock-.run-lock.json")
    assert synced[:2] == [("make_folder", "new"), ("sync_folder", tmp_path.name)]
    above = [step for step in synced[2:] if step == ("make_folder", temporary) or step[0] != "sync_folder"]
    assert above[0] == ("make_folder", temporary)  # after nothing but the folders above were synced
    assert synced[-4:] == [
        ("create", "manifest.json"),
        ("sync_folder", temporary),
        ("rename", temporary, "checkpoint-1"),
        ("sync_folder", "new"),
    ]
    assert watching.log.count("sync") == watching.log.count("create")


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs /proc")
def test_a_sync_reaches_the_system(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.readlink(f"/proc/self/fd/{descriptor}")))
    folder = Checkpointer(tmp_path).save(1, parts(1))
    names_synced = {Path(path).name for path in synced}
    assert {path.name for path in folder.iterdir()} <= names_synced
    assert tmp_path.name in names_synced


def test_a_file_that_exists_is_never_written_into(tmp_path):
    (tmp_path / "file").write_bytes(b"old")
    with pytest.raises(FileExistsError):
        files.write_file(tmp_path / "file", [b"new"])
    assert (tmp_path / "file").read_bytes() == b"old"


@pytest.fixture
def lower(monkeypatch):
    """Make the folders that are there by now ones that cannot be renamed, as those of a lower layer of overlayfs."""
    really, held = os.rename, set()

    def rename(source, target):
        if os.fspath(source) in held:
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), str(source), None, str(target))
        really(source, target)

    monkeypatch.setattr(os, "rename", rename)
    return lambda directory: held.update(str(path) for path in directory.rglob("*") if path.is_dir())


def test_a_checkpoint_that_cannot_be_moved_is_not_replaced_and_the_error_says_why(tmp_path, lower):
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, parts(1))
    lower(tmp_path)
    with pytest.raises(OSError, match="checkpoint-1 was not saved.*lower layer of a container's file system"):
        checkpointer.save(1, parts(2))
    assert listed(tmp_path) == ["checkpoint-1"]
    assert restored(tmp_path) == (1, 1)


def test_a_checkpoint_that_cannot_be_moved_is_not_removed_and_each_save_says_why(tmp_path, lower, caplog):
    checkpointer = Checkpointer(tmp_path, keep_last=1)
    checkpointer.save(1, parts(1))
    lower(tmp_path)
    for step in (2, 3):
        caplog.clear()
        checkpointer.save(step, parts(step))
        assert "checkpoint-1 could not be removed" in caplog.text
        assert "lower layer of a container's file system" in caplog.text
    assert listed(tmp_path) == ["checkpoint-1", "checkpoint-3"]
    assert restored(tmp_path) == (3, 3)


def test_a_folder_of_another_program_that_cannot_be_moved_stays_as_it_is(tmp_path, lower):
    (tmp_path / "checkpoint-1").mkdir()
    (tmp_path / "checkpoint-1" / "notes.txt").write_text("mine")
    lower(tmp_path)
    with pytest.raises(OSError, match="checkpoint-1 was not saved.*lower layer of a container's file system"):
        Checkpointer(tmp_path).save(1, parts(1))
    assert (tmp_path / "checkpoint-1" / "notes.txt").read_text() == "mine"
    assert listed(tmp_path) == ["checkpoint-1"]


def test_an_exported_model_that_cannot_be_moved_is_not_replaced_in_words(tmp_path, lower, capsys):
    Checkpointer(tmp_path / "run").save(
        1, parts(1), write_extra=lambda folder: (folder / "config.json").write_text("{}")
    )
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "model")]) == 0
    lower(tmp_path)
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "model"), "--overwrite"]) == 2
    assert f"{tmp_path / 'model'}: it cannot be moved, as it belongs to a lower layer" in capsys.readouterr().err
    assert listed(tmp_path) == ["model", "run"]
