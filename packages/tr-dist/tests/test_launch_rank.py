"""A rank under the launcher notes its exception, and shows it itself only where it does not end."""

import json
import time

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
    said, deadline = "", time.monotonic() + 30
    while not said and time.monotonic() < deadline:
        time.sleep(0.01)
        said = capsys.readouterr().err
    assert said == "ValueError: bad\n"


def test_a_rank_with_a_log_of_its_own_writes_it_there_at_once(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv(rank.ERROR_FILE, str(tmp_path / "note.json"))
    monkeypatch.setenv(rank.LOG_FOLDER, str(tmp_path))
    rank._note_and_show(ValueError, ValueError("bad"), None)
    assert capsys.readouterr().err == "ValueError: bad\n"
