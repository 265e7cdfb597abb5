import json
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tr_log import MetricsFile


@pytest.fixture
def whole(tmp_path, make_loop):
    """The file of a run that never stopped."""
    make_loop([MetricsFile()], tmp_path / "whole").train()
    return (tmp_path / "whole" / "metrics.jsonl").read_text()


def test_each_log_is_a_line_with_the_step_first_and_the_entrys_own_names(tmp_path, make_loop):
    loop = make_loop([MetricsFile()], tmp_path, max_steps=2).train()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [next(iter(line)) for line in lines] == ["step"] * 4
    assert lines == [{"step": entry["step"]} | entry for entry in loop.state.log_history]
    assert "train_loss" in lines[-1]


def test_numbers_that_json_has_no_form_for_are_strings(tmp_path, make_loop):
    loop = make_loop([MetricsFile()], tmp_path)
    loop.log({"loss": float("nan"), "grad_norm": float("inf")})
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 0, "loss": "NaN", "grad_norm": "Infinity"}\n'


def test_the_log_entry_itself_is_left_as_it_was(tmp_path, make_loop):
    logs = {"loss": 0.5, "step": 99}
    loop = make_loop([MetricsFile()], tmp_path)
    loop.state.global_step = 3
    loop.fire("on_log", logs=logs)
    assert logs == {"loss": 0.5, "step": 99}
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 3, "loss": 0.5}\n'


def test_only_the_main_process_writes(tmp_path, make_loop):
    make_loop([MetricsFile()], tmp_path, main=False).train()
    assert list(tmp_path.iterdir()) == []
    make_loop([MetricsFile()], tmp_path, main=True).train()
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


@pytest.mark.parametrize(("saved", "stopped"), [(1, 3), (2, 3), (3, 3), (1, 5), (2, 5), (4, 5), (5, 5)])
def test_a_run_resumed_anywhere_leaves_the_file_of_one_that_never_stopped(tmp_path, make_loop, whole, saved, stopped):
    checkpoint = make_loop([], tmp_path).train(stop_at=saved).checkpoint()
    make_loop([MetricsFile()], tmp_path).train(stop_at=stopped)
    make_loop([MetricsFile()], tmp_path).train(resume=checkpoint)
    assert (tmp_path / "metrics.jsonl").read_text() == whole


def test_entries_of_the_resumed_step_that_came_after_the_checkpoint_are_logged_again(tmp_path, make_loop, whole):
    first = make_loop([MetricsFile()], tmp_path)
    first.train(stop_at=2)
    checkpoint = first.checkpoint()
    first.log({"eval_loss": 0.1})  # an epoch's end, after the checkpoint of the step was written
    make_loop([MetricsFile()], tmp_path).train(resume=checkpoint)
    assert (tmp_path / "metrics.jsonl").read_text() == whole


def test_half_a_line_and_an_unreadable_one_do_not_hinder_a_resume(tmp_path, make_loop, whole, caplog):
    first = make_loop([MetricsFile()], tmp_path).train(stop_at=3)
    path = tmp_path / "metrics.jsonl"
    path.write_text("\0\0\0\n" + path.read_text() + '{"step": 4, "lo')
    make_loop([MetricsFile()], tmp_path).train(resume=first.checkpoint())
    assert path.read_text() == whole
    assert f"{path}: 1 of 5 lines are not readable and are dropped" in caplog.messages


def test_a_file_that_was_lost_is_written_again_from_the_checkpoint(tmp_path, make_loop, whole):
    first = make_loop([MetricsFile()], tmp_path).train(stop_at=3)
    (tmp_path / "metrics.jsonl").unlink()
    make_loop([MetricsFile()], tmp_path).train(resume=first.checkpoint())
    assert (tmp_path / "metrics.jsonl").read_text() == whole


def test_a_state_without_history_keeps_what_the_file_holds_up_to_the_step(tmp_path, make_loop):
    make_loop([MetricsFile()], tmp_path).train(stop_at=4, eval_steps=0)
    make_loop([MetricsFile()], tmp_path).train(resume=(2, []), stop_at=3, eval_steps=0)
    steps = [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2, 3]


def test_resuming_a_finished_run_leaves_the_file_alone(tmp_path, make_loop, whole):
    loop = make_loop([MetricsFile()], tmp_path).train()
    again = make_loop([MetricsFile()], tmp_path)
    # Its last checkpoint was written before the run was summed up.
    again.state.global_step, again.state.log_history = loop.state.max_steps, loop.state.log_history[:-1]
    again.fire("on_train_begin")
    again.fire("on_train_end")
    assert (tmp_path / "metrics.jsonl").read_text() == whole


def test_an_evaluation_that_was_still_to_come_at_the_last_step_is_in_the_file_once(tmp_path, make_loop):
    first = make_loop([MetricsFile()], tmp_path, max_steps=2).train(eval_steps=0, stop_at=2)
    step, history = first.checkpoint()
    first.log({"eval_loss": 0.5})
    first.log({"train_runtime": 1.0})
    for _ in range(2):
        again = make_loop([MetricsFile()], tmp_path, max_steps=2)
        again.state.global_step, again.state.log_history = step, list(history)
        again.fire("on_train_begin")
        again.log({"eval_loss": 0.5})
        again.log({"train_runtime": 2.0})
        again.fire("on_train_end")
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines == [{"step": entry["step"]} | entry for entry in again.state.log_history]
    assert len(lines) == 4


def test_a_new_run_keeps_the_old_file_beside_its_own(tmp_path, make_loop, whole, caplog):
    caplog.set_level(logging.INFO)
    for _ in range(3):
        make_loop([MetricsFile()], tmp_path).train()
    names = sorted(path.name for path in tmp_path.glob("*.jsonl"))
    assert names == ["metrics-1.jsonl", "metrics-2.jsonl", "metrics.jsonl"]
    assert {(tmp_path / name).read_text() for name in names} == {whole}
    assert f"what an earlier run in this folder logged is kept as {tmp_path / 'metrics-1.jsonl'}" in caplog.messages


def test_two_trainings_of_one_trainer_have_a_file_each(tmp_path, make_loop, whole):
    loop = make_loop([MetricsFile()], tmp_path)
    loop.train()
    loop.train()
    assert (tmp_path / "metrics-1.jsonl").read_text() == whole
    assert (tmp_path / "metrics.jsonl").read_text() == whole


def test_an_evaluation_before_the_training_belongs_to_it(tmp_path, make_loop):
    loop = make_loop([MetricsFile()], tmp_path, max_steps=1)
    loop.evaluate()
    loop.train()
    steps = [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert steps == [0, 1, 1]
    assert not (tmp_path / "metrics-1.jsonl").exists()


def test_an_evaluation_of_another_process_is_added_to_the_finished_runs_file(tmp_path, make_loop, whole):
    make_loop([MetricsFile()], tmp_path).train()
    make_loop([MetricsFile()], tmp_path).evaluate()
    assert (tmp_path / "metrics.jsonl").read_text().startswith(whole)
    assert len((tmp_path / "metrics.jsonl").read_text()) > len(whole)


def test_the_time_is_written_where_it_is_asked_for(tmp_path, make_loop):
    make_loop([MetricsFile.timed(None)], tmp_path, max_steps=1).train(eval_steps=0)
    first = json.loads((tmp_path / "metrics-timed.jsonl").read_text().splitlines()[0])
    assert list(first)[:3] == ["step", "time_s", "loss"]
    assert first["time_s"] > 1_700_000_000


def test_a_folder_that_cannot_be_written_does_not_stop_the_training(tmp_path, make_loop, whole, caplog):
    blocked = tmp_path / "blocked"
    blocked.write_text("a file where the folder should be")
    loop = make_loop([MetricsFile()], blocked)
    loop.train(stop_at=4)
    assert [m for m in caplog.messages if m.startswith("cannot write")][1:] == []
    blocked.unlink()
    loop.log({"loss": 0.5})
    assert (blocked / "metrics.jsonl").read_text().startswith(whole[:200])
    assert len((blocked / "metrics.jsonl").read_text().splitlines()) == 7


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs SIGKILL")
def test_a_killed_process_has_every_line_on_disk_that_it_logged(tmp_path):
    code = f"""
import os, signal, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from loop import Loop
from tr_log import MetricsFile
Loop([MetricsFile()], {str(tmp_path)!r}).train(stop_at=4)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", code], env=dict(os.environ))
    assert done.returncode == -signal.SIGKILL
    assert [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [
        1,
        2,
        2,
        3,
        4,
        4,
    ]


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\x85"])
def test_a_value_with_a_separator_of_lines_is_one_entry_to_a_resumed_run(tmp_path, make_loop, caplog, separator):
    first = make_loop([MetricsFile()], tmp_path).train(stop_at=1)
    first.log({"example": f"one{separator}two"})
    checkpoint = first.checkpoint()
    before = (tmp_path / "metrics.jsonl").stat()
    with caplog.at_level(logging.INFO, logger="tr_log"):
        make_loop([MetricsFile()], tmp_path).train(resume=checkpoint, stop_at=1)
    after = (tmp_path / "metrics.jsonl").stat()
    assert (after.st_ino, after.st_size, after.st_mtime_ns) == (before.st_ino, before.st_size, before.st_mtime_ns)
    assert caplog.text == ""


def test_a_line_that_is_nested_deeply_ends_no_resumed_run(tmp_path, make_loop, caplog):
    checkpoint = make_loop([MetricsFile()], tmp_path).train(stop_at=2).checkpoint()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write("[" * 100_000 + "\n")
    make_loop([MetricsFile()], tmp_path).train(resume=checkpoint, stop_at=3)
    assert "lines are not readable and are dropped" in caplog.text
    assert {json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()} == {1, 2, 3}
