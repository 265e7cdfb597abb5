"""The earlier entries of a long log are in files that are written once, and a resume finds all of them."""

import copy
import json
import logging
import math
from types import SimpleNamespace

import pytest

from tr_core import TrainerState
from tr_core.checkpoint import log_files
from tr_core.checkpoint.log_files import LogFiles
from tr_core.checkpoint.saving import _write_earlier_entries
from tr_core.state import SavedState


@pytest.fixture(autouse=True)
def few_entries(monkeypatch, caplog):
    monkeypatch.setattr(log_files, "ENTRIES", 10)
    with caplog.at_level(logging.WARNING, log_files.logger.name):  # whatever level an earlier Trainer has set
        yield


def logged(number, first=0):
    return [{"loss": 1 / (step + 1), "step": step} for step in range(first, first + number)]


def saved(state, files, folder):
    files.write(state.log_history, folder)
    return json.loads(json.dumps(SavedState(state, files).state_dict()))


def restored(held, *folders):
    held = copy.deepcopy(held)
    state, files = TrainerState(), LogFiles()
    SavedState(state, files).load_state_dict(held)
    files.read(state.log_history, list(folders))
    return state, files


def test_a_short_log_makes_no_file(tmp_path):
    state, files = TrainerState(log_history=logged(19)), LogFiles()
    held = saved(state, files, tmp_path / "log")
    assert len(held["log_history"]) == 19
    assert files.count == 0
    assert not (tmp_path / "log").exists()


@pytest.mark.parametrize("number", [20, 35, 1000])
def test_a_checkpoint_holds_the_last_entries_and_a_resume_has_all(tmp_path, number):
    state, files = TrainerState(log_history=logged(number)), LogFiles()
    held = saved(state, files, tmp_path / "log")
    assert 10 <= len(held["log_history"]) < 20
    assert held["log_history"][-1] == state.log_history[-1]
    assert len(state.log_history) == number
    again, _ = restored(held, tmp_path / "log")
    assert again.log_history == state.log_history


def test_what_a_save_writes_does_not_grow_with_the_log(tmp_path, monkeypatch):
    written = []
    write = log_files._write
    monkeypatch.setattr(log_files, "_write", lambda *given: (written.append(len(given[1])), write(*given))[1])
    state, files, sizes = TrainerState(), LogFiles(), []
    for first in range(0, 2000, 10):
        state.log_history += logged(10, first)
        written.clear()
        sizes.append(len(saved(state, files, tmp_path / "log")["log_history"]) + sum(written))
    assert set(sizes[2:]) == {20}


def test_a_resume_goes_on_with_the_files_and_an_earlier_checkpoint_stays_valid(tmp_path):
    state, files = TrainerState(log_history=logged(45)), LogFiles()
    early = saved(state, files, tmp_path)
    state.log_history += logged(40, 45)
    late = saved(state, files, tmp_path)
    again, resumed = restored(early, tmp_path)
    again.log_history += [{"loss": math.inf, "step": step} for step in range(45, 85)]  # goes another way
    other = saved(again, resumed, tmp_path)
    assert restored(late, tmp_path)[0].log_history == state.log_history
    assert restored(other, tmp_path)[0].log_history == again.log_history
    assert restored(early, tmp_path)[0].log_history == state.log_history[:45]


def test_a_run_that_resumes_elsewhere_writes_files_of_its_own(tmp_path):
    state, files = TrainerState(log_history=logged(45)), LogFiles()
    held = saved(state, files, tmp_path / "old")
    again, resumed = restored(held, tmp_path / "new", tmp_path / "old")
    assert again.log_history == state.log_history
    assert restored(saved(again, resumed, tmp_path / "new"), tmp_path / "new")[0].log_history == state.log_history


@pytest.mark.parametrize("change", ["emptied", "replaced", "cut"])
def test_a_log_that_a_user_exchanges_is_written_from_its_beginning(tmp_path, change):
    state, files = TrainerState(log_history=logged(45)), LogFiles()
    saved(state, files, tmp_path)
    if change == "emptied":
        state.log_history.clear()
    elif change == "cut":
        del state.log_history[:20]
    else:
        state.log_history = logged(50, 100)
    assert restored(saved(state, files, tmp_path), tmp_path)[0].log_history == state.log_history


def test_entries_that_json_does_not_hold_stay_in_the_checkpoint(tmp_path):
    state, files = TrainerState(log_history=[*logged(5), {"value": (1, 2), "step": 6}, *logged(40, 7)]), LogFiles()
    files.write(state.log_history, tmp_path)
    assert SavedState(state, files).state_dict()["log_history"] == state.log_history


def test_a_disk_that_takes_no_file_leaves_all_in_the_checkpoint(tmp_path, caplog):
    (tmp_path / "log").write_text("a file in its place")
    state, files = TrainerState(log_history=logged(45)), LogFiles()
    files.write(state.log_history, tmp_path / "log")
    assert len(SavedState(state, files).state_dict()["log_history"]) == 45
    assert "earlier log entries stay in the checkpoints" in caplog.text


@pytest.mark.parametrize("damage", ["missing", "changed"])
def test_a_resume_without_the_files_says_what_is_missing_and_has_the_rest(tmp_path, damage, caplog):
    state, files = TrainerState(log_history=logged(45)), LogFiles()
    held = saved(state, files, tmp_path)
    first, second, _ = sorted(tmp_path.iterdir())
    second.unlink() if damage == "missing" else second.write_text("{}")
    again, resumed = restored(held, tmp_path)
    assert again.log_history == state.log_history[20:]
    assert "the first 20 of the logged entries are missing from state.log_history" in caplog.text
    again.log_history += logged(20, 45)
    assert restored(saved(again, resumed, tmp_path), tmp_path)[0].log_history == again.log_history


def test_the_name_of_a_file_leads_nowhere_else(tmp_path, caplog):
    (tmp_path / "secret").write_text("x")
    for name in ("../secret", "x" * 1000, "a\0"):
        note = {"entries": 1, "last": {"name": name, "sha256": ""}}
        again, _ = restored({"log_history": [], "log_history_before": note}, tmp_path / "log")
        assert again.log_history == []
    assert "is not a file of it" in caplog.text


@pytest.mark.parametrize("rank", [0, 2])
def test_a_machine_that_shares_no_folder_saves_the_whole_log(tmp_path, rank):
    state, files = TrainerState(log_history=logged(45)), LogFiles()
    args = SimpleNamespace(output_dir=tmp_path, save_only_model=False, save_on_each_node=True)
    methods = SimpleNamespace(args=args, state=state)
    _write_earlier_entries(SimpleNamespace(methods=methods, strategy=SimpleNamespace(rank=rank), log_files=files))
    assert SavedState(state, files).state_dict()["log_history"] == state.log_history


def edit(history):
    history[12]["loss"] = 7.0


def add_a_list(history):
    history[12]["more"] = [1]


def replace(history):
    history[12] = {"loss": 7.0, "step": 12}


def put_in(history):
    history.insert(12, {"note": 7.0, "step": 12})


def sort(history):
    history[3:9] = reversed(history[3:9])


@pytest.mark.parametrize("change", [edit, add_a_list, replace, put_in, sort])
@pytest.mark.parametrize("resumes", [False, True])
def test_a_change_of_an_entry_in_a_file_is_saved(tmp_path, change, resumes):
    state, files = TrainerState(log_history=[*logged(44), {"loss": math.nan, "step": 44}, *logged(20, 45)]), LogFiles()
    held = saved(state, files, tmp_path)
    if resumes:
        state, files = restored(held, tmp_path)
    before = {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    assert saved(state, files, tmp_path) == held
    assert {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == before  # nothing is written again
    change(state.log_history)
    assert repr(restored(saved(state, files, tmp_path), tmp_path)[0].log_history) == repr(state.log_history)
    assert repr(restored(held, tmp_path)[0].log_history) != repr(state.log_history)


@pytest.mark.parametrize("note", [[], {}, {"entries": 1, "last": None}, {"entries": 1, "last": {"name": 1}}])
def test_a_state_that_names_no_files_is_refused(tmp_path, note):
    path = tmp_path / "trainer_state.json"
    path.write_text(json.dumps({"log_history": [], "log_history_before": note}))
    with pytest.raises(ValueError, match=r"trainer_state.json cannot be read: .* does not name the files"):
        TrainerState.load_from_json(path)
