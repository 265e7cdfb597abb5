"""One run at a time saves to a folder: who is refused, who waits, and who takes over."""

import contextlib
import errno
import gc
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import ckpt_workers
import pytest
from ckpt_faults import Faults, Killed
from ckpt_parts import listed, parts, restored

from tr_ckpt import (
    Checkpointer,
    FolderInUseError,
    command,
    files,
    folder_lock,
    processes,
    retention,
    staging,
)
from tr_ckpt.folder_lock import NAME, FolderLock, Owner

FORKSERVER = multiprocessing.get_context("forkserver" if hasattr(os, "fork") else "spawn")


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    """Let nobody wait for long."""
    monkeypatch.setattr(processes, "BEAT_S", 0.1)
    monkeypatch.setattr(processes, "STILL_S", 0.6)
    for name, seconds in {
        "ENDING_S": 0.4,
        "_TRY_AGAIN_S": 0.001,
        "_POLL_S": 0.02,
        "_READ_DELAY_S": 0.01,
    }.items():
        monkeypatch.setattr(folder_lock, name, seconds)
    yield
    for held in list(folder_lock._held.values()):
        folder_lock._held.pop(os.path.realpath(held.folder))


@contextlib.contextmanager
def held_elsewhere(folder):
    here, there = FORKSERVER.Pipe()
    process = FORKSERVER.Process(target=ckpt_workers.hold, args=(str(folder), there))
    process.start()
    there.close()
    try:
        assert here.recv() == "locked"
        yield process
    finally:
        here.close()
        process.join(60)
        if process.is_alive():
            process.kill()


def left_by_the_dead(folder):
    process = FORKSERVER.Process(target=ckpt_workers.die_with, args=(str(folder),))
    process.start()
    process.join(60)
    assert process.exitcode == 9
    found = folder_lock.read_file(folder / NAME)
    assert found.process.pid == process.pid
    return found


def left_by(folder, **changes):
    """Leave the lock of a process that differs from this one in `changes`."""
    owner = Owner.new()
    owner = replace(owner, process=replace(owner.process, **changes))
    folder.mkdir(exist_ok=True)
    (folder / NAME).write_bytes(owner.content())
    return owner


def test_a_folder_is_locked_from_the_first_save_to_the_end(tmp_path):
    checkpointer = Checkpointer(tmp_path / "run")
    assert not (tmp_path / "run").exists()
    checkpointer.save(1, parts(1))
    owner = folder_lock.read_file(tmp_path / "run" / NAME)
    assert owner.process == processes.this_process()
    checkpointer.close()
    assert os.listdir(tmp_path / "run") == ["checkpoint-1"]
    checkpointer.save(2, parts(2))
    assert folder_lock.read_file(tmp_path / "run" / NAME).key != owner.key
    del checkpointer
    gc.collect()
    assert sorted(os.listdir(tmp_path / "run")) == ["checkpoint-1", "checkpoint-2"]


def test_several_of_one_process_share_a_lock_and_the_last_gives_it_up(tmp_path):
    first, second = Checkpointer(tmp_path), Checkpointer(tmp_path / "." / ".." / tmp_path.name)
    first.claim()
    first.claim()
    second.save(1, parts(1))
    first.close()
    assert (tmp_path / NAME).exists()
    second.save(2, parts(2))
    second.release()
    second.release()
    assert not (tmp_path / NAME).exists()


def test_a_folder_that_nothing_was_saved_in_goes_with_its_lock(tmp_path):
    checkpointer = Checkpointer(tmp_path / "a" / "b")
    checkpointer.claim()
    assert os.listdir(tmp_path / "a" / "b") == [NAME]
    checkpointer.close()
    assert os.listdir(tmp_path) == []


def test_a_run_is_refused_while_another_lives(tmp_path, caplog):
    Checkpointer(tmp_path).save(4, parts(4))
    with held_elsewhere(tmp_path) as other:
        assert restored(tmp_path) == (4, 4)  # reading needs no lock
        assert "in use" not in caplog.text
        checkpointer = Checkpointer(tmp_path)
        with pytest.raises(FolderInUseError) as refused:
            checkpointer.claim()
        with pytest.raises(FolderInUseError, match="is in use"):
            checkpointer.save(1, parts(1))
        assert listed(tmp_path) == ["checkpoint-4"]
        text = str(refused.value)
        assert f"process {other.pid} on {socket.gethostname()} (since 2" in text
        assert "give this one a folder of its own (output_dir), wait for the other, or end it" in text
        assert "waiting up to" in caplog.text
    checkpointer.save(1, parts(1))


@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="needs SIGSTOP")
def test_a_suspended_process_of_this_machine_keeps_its_lock(tmp_path, monkeypatch):
    monkeypatch.setattr(folder_lock, "ENDING_S", 3 * processes.STILL_S)  # longer than one of another machine has
    with held_elsewhere(tmp_path) as other:
        os.kill(other.pid, signal.SIGSTOP)
        try:
            with pytest.raises(FolderInUseError, match="is in use"):
                Checkpointer(tmp_path).save(1, parts(1))
        finally:
            os.kill(other.pid, signal.SIGCONT)
    assert not listed(tmp_path)


def test_a_run_that_ends_soon_is_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(folder_lock, "ENDING_S", 60.0)
    with held_elsewhere(tmp_path) as other:
        threading.Timer(0.3, other.kill).start()
        Checkpointer(tmp_path).save(1, parts(1))


def test_what_a_dead_process_locked_is_taken_over_at_once(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(folder_lock, "ENDING_S", 600.0)
    owner = left_by_the_dead(tmp_path)
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, parts(1))
    assert f"was left locked by process {owner.process.pid}" in caplog.text
    assert "waiting" not in caplog.text
    assert listed(tmp_path) == ["checkpoint-1"]
    assert folder_lock.read_file(tmp_path / NAME).process == processes.this_process()


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs /proc")
def test_a_zombie_is_gone(tmp_path):
    child = subprocess.Popen([sys.executable, "-c", ""])
    while processes._state(child.pid)[0] != "Z":
        time.sleep(0.01)
    left_by(tmp_path, pid=child.pid, started=0)
    FolderLock(tmp_path).claim()
    child.wait(60)


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs /proc")
def test_who_has_the_number_of_a_dead_process_is_not_it(tmp_path):
    parent = os.getppid()
    left_by(tmp_path, pid=parent, started=processes._state(parent)[1])
    with pytest.raises(FolderInUseError):
        FolderLock(tmp_path).claim()
    left_by(tmp_path, pid=parent, started=processes._state(parent)[1] + 1)
    FolderLock(tmp_path).claim()


def test_what_this_process_locked_as_another_program_is_taken_over(tmp_path):
    left_by(tmp_path)
    FolderLock(tmp_path).claim()


ELSEWHERE = [{"host": "elsewhere"}, {"boot": "0a1b2c3d", "numbering": "0a1b2c3d"}]  # the second may be of one image


@pytest.mark.parametrize("changes", ELSEWHERE, ids=["another name", "another boot"])
def test_another_machine_that_shows_no_life_is_taken_over_after_a_while(tmp_path, caplog, monkeypatch, changes):
    monkeypatch.setattr(processes, "_machine", lambda: "a machine")
    left_by(tmp_path, **changes)
    begun = time.monotonic()
    FolderLock(tmp_path).claim()
    assert time.monotonic() - begun >= processes.STILL_S
    assert "is in use by process" in caplog.text
    assert f"on {changes.get('host', processes.host_name())}" in caplog.text
    assert "to see whether it is alive" in caplog.text


@pytest.mark.parametrize("changes", ELSEWHERE, ids=["another name", "another boot"])
def test_another_machine_that_lives_is_respected(tmp_path, monkeypatch, changes):
    monkeypatch.setattr(processes, "_machine", lambda: "a machine")
    monkeypatch.setattr(processes, "STILL_S", 60.0)  # it gives signs more often, on a busy machine too
    owner = left_by(tmp_path, **changes)
    ended = threading.Event()

    def live():
        number = 0
        while not ended.wait(0.1):
            number += 1
            folder_lock._update(tmp_path / NAME, owner, number)

    thread = threading.Thread(target=live)
    thread.start()
    try:
        with pytest.raises(FolderInUseError, match=r"process .* on .* is alive"):
            FolderLock(tmp_path).claim()
    finally:
        ended.set()
        thread.join(60)
    assert folder_lock.read_file(tmp_path / NAME).key == owner.key


def test_an_owner_shows_that_it_lives(tmp_path):
    lock = FolderLock(tmp_path)
    lock.claim()
    first = folder_lock.read_file(tmp_path / NAME)
    folder_lock.beat()
    second = folder_lock.read_file(tmp_path / NAME)
    assert first.beat != second.beat
    assert (first.key, first.process) == (second.key, second.process)
    assert any(thread.name == "folder lock" and thread.daemon for thread in threading.enumerate())


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"\xff\xfe", b'{"format": 2}', b"[" * 4000, b'{"format": 1, "key": "../x"}', b"x" * 100_000],
)
def test_a_damaged_lock_is_one_of_an_unknown_owner(tmp_path, content, caplog):
    (tmp_path / NAME).write_bytes(content)
    FolderLock(tmp_path).claim()
    assert "a run that its .run-lock.json does not name" in caplog.text
    assert folder_lock.read_file(tmp_path / NAME).process == processes.this_process()


def test_what_a_lock_says_is_printed_only_if_it_is_plain(tmp_path):
    left_by(tmp_path, host="\x1b[31mhost")
    assert folder_lock.read_file(tmp_path / NAME).process is None


@pytest.mark.parametrize("kind", ["link", "fifo"])
def test_a_lock_that_is_no_plain_file_is_not_followed(tmp_path, kind):
    if kind == "link":
        (tmp_path / "target").write_text("kept")
        (tmp_path / NAME).symlink_to(tmp_path / "target")
    else:
        os.mkfifo(tmp_path / NAME)
    FolderLock(tmp_path).claim()
    assert folder_lock.read_file(tmp_path / NAME).process == processes.this_process()
    assert kind == "fifo" or (tmp_path / "target").read_text() == "kept"


def taken_away(folder):
    """Have another run take over the folder."""
    return left_by(folder, host="elsewhere")


@pytest.mark.parametrize("asynchronous", [False, True])
def test_an_owner_that_has_lost_its_lock_saves_no_more(tmp_path, asynchronous):
    checkpointer = Checkpointer(tmp_path, asynchronous=asynchronous)
    checkpointer.save(1, parts(1))
    checkpointer.wait()
    other = taken_away(tmp_path)
    for _ in range(2):
        with pytest.raises(FolderInUseError, match=r"taken over by process .* on elsewhere .* saves no more there"):
            checkpointer.save(2, parts(2))
    checkpointer.close()
    assert listed(tmp_path) == ["checkpoint-1"]
    assert folder_lock.read_file(tmp_path / NAME).key == other.key


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_lock_that_is_lost_during_a_save_is_noticed_before_the_commit(tmp_path, asynchronous):
    checkpointer = Checkpointer(tmp_path, asynchronous=asynchronous)
    checkpointer.save(1, parts(1))
    checkpointer.wait()

    def save():
        checkpointer.save(2, parts(2), write_extra=lambda folder: taken_away(tmp_path))
        checkpointer.wait()

    with pytest.raises(FolderInUseError, match="was taken over"):
        save()
    assert listed(tmp_path) == ["checkpoint-1"]


def test_a_lock_that_is_lost_while_a_disk_syncs_is_noticed_before_the_rename(tmp_path, monkeypatch):
    checkpointer, sync = Checkpointer(tmp_path), files.Unsynced.sync
    checkpointer.save(1, parts(1))

    def slow(unsynced, *folders):
        sync(unsynced, *folders)
        if folders:  # the last sync before the rename
            taken_away(tmp_path)

    monkeypatch.setattr(files.Unsynced, "sync", slow)
    with pytest.raises(FolderInUseError, match="was taken over"):
        checkpointer.save(2, parts(2))
    assert listed(tmp_path) == ["checkpoint-1"]


def test_a_lock_that_is_lost_while_a_checkpoint_is_read_back_removes_none(tmp_path, monkeypatch):
    checkpointer, read_back = Checkpointer(tmp_path, keep_last=1), retention.Surplus.read_back
    checkpointer.save(1, parts(1))

    def slow(*given):
        taken_away(tmp_path)
        return read_back(*given)

    monkeypatch.setattr(retention.Surplus, "read_back", slow)
    with pytest.raises(FolderInUseError, match="was taken over"):
        checkpointer.save(2, parts(2))
    assert listed(tmp_path) == ["checkpoint-1", "checkpoint-2"]


def test_a_lock_that_is_lost_while_a_step_is_replaced_leaves_the_older_one(tmp_path, monkeypatch):
    checkpointer, is_sound = Checkpointer(tmp_path), staging._is_sound
    checkpointer.save(1, parts(1))
    monkeypatch.setattr(staging, "_is_sound", lambda folder: bool(taken_away(tmp_path)) and is_sound(folder))
    with pytest.raises(FolderInUseError, match="was taken over"):
        checkpointer.save(1, parts(2))
    assert len(list(tmp_path.glob(".tmp-replaced-checkpoint-1@*"))) == 1


def test_a_beat_that_fails_is_said_once_until_one_succeeds(tmp_path, monkeypatch, caplog):
    FolderLock(tmp_path).claim()
    full, beat = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), folder_lock._update
    said = (
        f"{tmp_path / NAME} cannot be updated ({full}), which shows other machines that this run lives: if that lasts"
    )
    for times in (1, 2):
        monkeypatch.setattr(folder_lock, "_update", lambda *given: (_ for _ in ()).throw(full))
        folder_lock.beat()
        folder_lock.beat()
        assert caplog.text.count(said) == times
        monkeypatch.setattr(folder_lock, "_update", beat)
        folder_lock.beat()
    assert "a run on another machine takes the folder over after 1 s, and this one saves no more; free" in caplog.text


def test_a_beat_does_not_touch_the_lock_of_another(tmp_path):
    lock = FolderLock(tmp_path)
    lock.claim()
    taken_away(tmp_path)
    before = (tmp_path / NAME).read_bytes()
    folder_lock.beat()
    lock.release()
    assert (tmp_path / NAME).read_bytes() == before


def test_a_lock_that_somebody_removed_is_put_back(tmp_path, caplog):
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, parts(1))
    owner = folder_lock.read_file(tmp_path / NAME)
    (tmp_path / NAME).unlink()
    checkpointer.save(2, parts(2))
    assert folder_lock.read_file(tmp_path / NAME).key == owner.key
    assert "was removed from" in caplog.text


def test_a_lock_that_is_gone_after_a_long_sleep_is_lost(tmp_path, monkeypatch):
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, parts(1))
    (tmp_path / NAME).unlink()
    now = folder_lock._now_s()
    monkeypatch.setattr(folder_lock, "_now_s", lambda: now + 100)
    with pytest.raises(FolderInUseError, match="was unlocked"):
        checkpointer.save(2, parts(2))
    assert listed(tmp_path) == ["checkpoint-1"]


@pytest.mark.parametrize("left", [False, True])
def test_of_claims_at_the_same_moment_exactly_one_wins(tmp_path, left):
    folders = [tmp_path / str(number) for number in range(100)]
    dead = left_by_the_dead(tmp_path / "dead") if left else None
    for folder in folders:
        folder.mkdir()
        if dead is not None:
            (folder / NAME).write_bytes(replace(dead, key=processes.secrets.token_hex(8)).content())
    barrier, results = FORKSERVER.Barrier(3), FORKSERVER.Queue()
    arguments = ([str(folder) for folder in folders], barrier, results)
    racers = [FORKSERVER.Process(target=ckpt_workers.race, args=arguments) for _ in range(3)]
    for racer in racers:
        racer.start()
    won = [folder for _ in racers for folder in results.get(timeout=120)]
    for racer in racers:
        racer.join(60)
    assert sorted(won) == sorted(map(str, folders))
    assert not any(os.listdir(folder) for folder in folders)


def test_a_process_killed_while_taking_over_is_taken_over_too(tmp_path):
    for at in range(1, 20):
        folder = tmp_path / str(at)
        folder.mkdir()
        left_by(folder, pid=2**22 + 1)  # no process has this number
        with Faults(at) as faults, contextlib.suppress(Killed):
            FolderLock(folder).claim()
        FolderLock(folder).claim()
        Checkpointer(folder).save(1, parts(1))
        assert listed(folder) == ["checkpoint-1"]
        if len(faults.log) < at:
            break
    else:
        pytest.fail("there are more operations than expected")


@pytest.mark.parametrize("number", ["EPERM", "ENOTSUP", "EMLINK"])
def test_a_file_system_without_hard_links_is_locked_too(tmp_path, monkeypatch, number):
    def fail(source, target):
        raise OSError(getattr(errno, number), "no links")

    monkeypatch.setattr(files, "link", fail)
    left_by(tmp_path, pid=2**22 + 1)
    FolderLock(tmp_path).claim()
    assert folder_lock.read_file(tmp_path / NAME).process == processes.this_process()
    assert os.listdir(tmp_path) == [NAME]


def test_where_no_lock_can_be_made_a_save_goes_on_and_says_so_once(tmp_path, monkeypatch, caplog):
    def fail(source, target):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(files, "link", fail)
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, parts(1))
    checkpointer.save(2, parts(2))
    assert caplog.text.count("cannot be locked") == 1
    monkeypatch.undo()
    checkpointer.save(3, parts(3))
    assert (tmp_path / NAME).exists()


@pytest.mark.parametrize("left", [False, True], ids=["free", "left by a dead process"])
def test_a_file_system_that_loses_what_is_made_is_used_without_a_lock(tmp_path, monkeypatch, caplog, left):
    if left:
        left_by_the_dead(tmp_path)
    missing = FileNotFoundError(errno.ENOENT, "no such file")
    monkeypatch.setattr(files, "link", lambda *given: (_ for _ in ()).throw(missing))
    FolderLock(tmp_path).claim()
    assert "a file that was just made was gone 200 times" in caplog.text
    assert "nothing stops another run from saving there" in caplog.text


@pytest.mark.parametrize("times", [2, 10**9], ids=["for a moment", "for good"])
def test_a_lock_that_cannot_be_read_is_read_again_and_then_respected(tmp_path, monkeypatch, times):
    left_by(tmp_path, pid=2**22 + 1)
    left, original = [times], os.open

    def fails(path, *arguments, **options):
        if Path(path).name == NAME and left[0]:
            left[0] -= 1
            raise OSError(116, "Stale file handle")
        return original(path, *arguments, **options)

    monkeypatch.setattr(os, "open", fails)
    if times == 2:
        FolderLock(tmp_path).claim()
        assert left == [0]
        return
    with pytest.raises(OSError, match=r"whether another run saves to .* cannot be known: .*fix that"):
        Checkpointer(tmp_path).save(1, parts(1))
    assert os.listdir(tmp_path) == [NAME]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_fork_neither_unlocks_nor_owns(tmp_path):
    program = """
import gc, os, sys
from pathlib import Path
from tr_ckpt import Checkpointer, FolderInUseError, folder_lock
from ckpt_parts import parts
folder_lock.ENDING_S = 0.2
checkpointer = Checkpointer(sys.argv[1])
checkpointer.save(1, parts(1))
child = os.fork()
if child == 0:
    try:
        checkpointer.release()
        before = Path(sys.argv[1], ".run-lock.json").read_bytes()
        folder_lock.beat()
        assert Path(sys.argv[1], ".run-lock.json").read_bytes() == before
        try:
            checkpointer.save(2, parts(2))
        except FolderInUseError as error:
            assert f"process {os.getppid()} on" in str(error), error
            del checkpointer
            gc.collect()
            os._exit(0)
    finally:
        os._exit(1)
assert os.waitpid(child, 0)[1] == 0
assert Path(sys.argv[1], ".run-lock.json").exists()
checkpointer.save(3, parts(3))
"""
    ended = run_script(program, tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert listed(tmp_path) == ["checkpoint-1", "checkpoint-3"]
    assert not (tmp_path / NAME).exists()  # at the end of the program, which closed nothing


def run_script(program, *arguments):
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program, *map(str, arguments)],
        cwd=Path(__file__).parent, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


def test_what_dead_processes_left_is_cleared_only_by_who_holds_the_lock(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "STILL_S", 0.0)
    left = tmp_path / ".tmp-writing-checkpoint-7@elsewhere@12@0a1b2c3d"
    left.mkdir()
    with held_elsewhere(tmp_path), pytest.raises(FolderInUseError):
        Checkpointer(tmp_path).save(1, parts(1))
    assert left.is_dir()
    Checkpointer(tmp_path).save(1, parts(1))
    assert not left.exists()


def test_a_claim_costs_a_run_seven_operations_and_a_save_none(tmp_path):
    checkpointer = Checkpointer(tmp_path)
    with Faults() as counted:
        checkpointer.claim()
    assert counted.log == ["create", "write", "sync", "link", "remove_file"]
    with Faults() as counted:
        checkpointer.release()
    assert counted.log == ["remove_file"]


def test_commands_that_change_a_folder_are_refused_while_a_run_saves(tmp_path, capsys):
    for step in (1, 2):
        Checkpointer(tmp_path).save(step, parts(step))
    changed = next(path for path in (tmp_path / "checkpoint-2").glob("*.json") if path.name != "manifest.json")
    with changed.open("a") as file:
        file.write(" ")
    with held_elsewhere(tmp_path) as other:
        assert command.main(["seal", str(tmp_path / "checkpoint-2"), "--yes"]) == command.ERROR
        assert f"is in use: process {other.pid} on" in capsys.readouterr().err
    assert command.main(["seal", str(tmp_path / "checkpoint-2"), "--yes"]) == 0
    with held_elsewhere(tmp_path):
        assert command.main(["prune", str(tmp_path), "--keep", "1", "--yes"]) == command.ERROR
        assert "is in use" in capsys.readouterr().err
    assert listed(tmp_path) == ["checkpoint-1", "checkpoint-2"]
