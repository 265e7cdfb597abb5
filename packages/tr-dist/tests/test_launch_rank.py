"""A rank under the launcher notes its exception, and shows it itself only where it does not end."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tr_dist.launching import rank


def fail(monkeypatch, tmp_path, patience_s):
    monkeypatch.setenv(rank.ERROR_FILE, str(tmp_path / "note.json"))
    monkeypatch.delenv(rank.LOG_FOLDER, raising=False)
    monkeypatch.setattr(rank, "_PATIENCE_S", patience_s)
    error = ValueError("bad")
    rank._note_and_show(ValueError, error, None)
    return json.loads((tmp_path / "note.json").read_text())


def test_an_exception_is_left_to_the_launcher_to_say(monkeypatch, tmp_path, capsys):
    assert fail(monkeypatch, tmp_path, 3600.0)["message"] == "ValueError: bad"
    assert capsys.readouterr().err == ""


def test_a_rank_that_does_not_end_says_it_itself(monkeypatch, tmp_path, capsys):
    fail(monkeypatch, tmp_path, 0.0)
    said, deadline = "", time.monotonic() + 60
    while not said and time.monotonic() < deadline:
        time.sleep(0.01)
        said = capsys.readouterr().err
    assert said == "ValueError: bad\n"


def test_a_rank_with_a_log_of_its_own_writes_it_there_at_once(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv(rank.ERROR_FILE, str(tmp_path / "note.json"))
    monkeypatch.setenv(rank.LOG_FOLDER, str(tmp_path))
    rank._note_and_show(ValueError, ValueError("bad"), None)
    assert capsys.readouterr().err == "ValueError: bad\n"


# Starts a rank as the launcher does, and waits. Arguments: rank.py, script, seconds, offset of its number, platform.
LAUNCHER = """
import os, subprocess, sys
os.environ["TR_LAUNCH_LAUNCHER"] = f"{os.getpid() + int(sys.argv[4])} {sys.argv[3]}"
run = f"import runpy, sys\\nsys.platform = {sys.argv[5]!r}\\ndel sys.argv[0]\\n"
run += "runpy.run_path(sys.argv[0], None, '__main__')"
print("launcher", os.getpid(), flush=True)
subprocess.Popen([sys.executable, "-u", "-c", run, sys.argv[1], sys.argv[2]], start_new_session=True).wait()
"""
WAITING = """
import os, signal, sys, time
assert "TR_LAUNCH_LAUNCHER" not in os.environ
def end(number, frame):
    print("saved after", signal.Signals(number).name, flush=True)
    time.sleep(1)
    sys.exit(128 + number)
signal.signal(signal.SIGTERM, end)
print("rank", os.getpid(), flush=True)
time.sleep(600)
"""
STUBBORN = """
import ctypes, os, signal, subprocess, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("rank", os.getpid(), child.pid, flush=True)
ctypes.CDLL(None).sleep(600)
"""
needs_proc = pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs /proc")


def launcher_of(tmp_path, program, *, within_s=60.0, offset=0, platform=sys.platform):
    """Return the command line of a launcher."""
    script = tmp_path / "script.py"
    script.write_text(program)
    return [sys.executable, "-c", LAUNCHER, rank.__file__, str(script), str(within_s), str(offset), platform]


def numbers_in(line, who):
    """Return the process numbers that a launcher or rank says."""
    said, *numbers = line.split()
    assert said == who
    return [int(number) for number in numbers]


def killed(command):
    """Kill a launcher when its rank has begun; return the numbers of that and its child, and what it said then."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as launcher:
        try:
            numbers_in(launcher.stdout.readline(), "launcher")
            numbers = numbers_in(launcher.stdout.readline(), "rank")
        finally:
            launcher.kill()
        return numbers, launcher.stdout.read()  # up to the end of the last process that could write


def have_ended(numbers):
    """Wait until processes are gone: their ends of a pipe go a little before."""
    for _ in range(600):
        if not any(map(is_running, numbers)):
            return True
        time.sleep(0.05)
    return False


def is_running(number):
    """Whether a process is there and more than a note of how it ended."""
    try:
        return Path(f"/proc/{number}/stat").read_bytes().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except (FileNotFoundError, ProcessLookupError):
        return False


@needs_proc
@pytest.mark.parametrize("platform", ["linux", "darwin"])
def test_a_rank_is_asked_to_end_once_when_its_launcher_is_killed(tmp_path, platform):
    numbers, left = killed(launcher_of(tmp_path, WAITING, platform=platform))
    assert left == "saved after SIGTERM\n"
    assert have_ended(numbers)


@needs_proc
def test_a_rank_that_does_not_end_is_killed_with_what_it_started(tmp_path):
    numbers, left = killed(launcher_of(tmp_path, STUBBORN, within_s=0.5))
    assert left == ""
    assert len(numbers) == 2
    assert have_ended(numbers)


@needs_proc
def test_a_rank_whose_launcher_is_gone_before_it_begins_does_not_begin(tmp_path):
    command = launcher_of(tmp_path, WAITING, offset=1)
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.stdout.split()[0] == "launcher"
    assert "rank" not in ended.stdout


@needs_proc
def test_a_rank_is_left_alone_when_who_started_its_launcher_goes(tmp_path):
    """As after `nohup trainer launch ... &`: only the launcher itself counts."""
    starter = "import subprocess, sys; subprocess.Popen(sys.argv[1:])"
    command = [sys.executable, "-c", starter, *launcher_of(tmp_path, WAITING)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as started:
        [launcher] = numbers_in(started.stdout.readline(), "launcher")
        try:
            [number] = numbers_in(started.stdout.readline(), "rank")
            started.wait(60)
            time.sleep(3 * rank._LOOK_S)
            assert is_running(number)
        finally:
            os.kill(launcher, signal.SIGKILL)
        assert started.stdout.read() == "saved after SIGTERM\n"
