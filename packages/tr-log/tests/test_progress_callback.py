"""What stands in a log file; what is drawn on a terminal is in test_bars_on_a_terminal.py."""

import io
import re
import sys
from functools import partial
from types import SimpleNamespace

import pytest

from tr_log import ProgressCallback
from tr_log.progress import RateMeter


@pytest.fixture
def stream():
    return io.StringIO()


def lines(stream):
    return stream.getvalue().splitlines()


def test_a_training_is_shown_in_one_line_a_log_and_one_at_each_end(stream, tmp_path, make_loop):
    make_loop([ProgressCallback(stream)], tmp_path, max_steps=4).train(logging_steps=2, eval_steps=4)
    told = lines(stream)
    assert len(told) == 5
    assert told[0] == "training for 4 steps, 2 epochs"
    speed, eta = r"[\d.]+ (it/s|s/it)", r"eta \d:\d\d"
    assert re.fullmatch(rf"step 2/4 \(50%\)  loss 0.5  grad_norm 1.25  lr 2e-05  epoch 1  {speed}  {eta}", told[1])
    assert re.fullmatch(rf"step 4/4 \(100%\)  loss 0.25  grad_norm 1.25  lr 4e-05  epoch 2  {speed}", told[2])
    assert told[3] == "step 4/4 (100%)  evaluation  eval_loss 0.2  epoch 2  0.5 s, 64 samples/s"
    assert re.fullmatch(rf"training finished  4 steps in \d:\d\d  {speed}  32 samples/s  train_loss 0.5", told[4])


def test_a_thousand_steps_leave_as_many_lines_as_logs(stream, tmp_path, make_loop):
    make_loop([ProgressCallback(stream)], tmp_path, max_steps=1000).train(logging_steps=250, eval_steps=500)
    assert len(lines(stream)) == 1 + 4 + 2 + 1


def test_a_resumed_training_says_where_it_goes_on(stream, tmp_path, make_loop):
    make_loop([ProgressCallback(stream)], tmp_path).train(resume=(4, []), eval_steps=0)
    assert lines(stream)[0] == "training goes on at step 4 of 6 steps"
    assert lines(stream)[1].startswith("step 5/6 (83%)  loss")


def test_epochs_that_nobody_can_count_are_not_shown(stream, tmp_path, make_loop):
    loop = make_loop([ProgressCallback(stream)], tmp_path, max_steps=4)
    loop.state.num_train_epochs = sys.maxsize  # as a Trainer has it for a stream
    loop.train(eval_steps=0)
    assert lines(stream)[0] == "training for 4 steps"


def test_a_training_that_fails_says_where_it_stopped(stream, tmp_path, make_loop):
    with pytest.raises(KeyError):
        make_loop([ProgressCallback(stream)], tmp_path).train(stop_at=2, error=KeyError("boom"))
    assert re.fullmatch(
        r"training stopped by KeyError at step 2/6 \(33%\) after \d:\d\d  [\d.]+ (it/s|s/it)", lines(stream)[-1]
    )


def test_nan_is_shown(stream, tmp_path, make_loop):
    make_loop([ProgressCallback(stream)], tmp_path).log({"loss": float("nan")})
    assert lines(stream) == ["step 0  loss nan"]


def test_the_speed_leaves_evaluations_out_and_the_time_left_counts_them(stream, tmp_path, make_loop, monkeypatch):
    seconds = [0.0]
    monkeypatch.setattr("tr_log.progress_callback.RateMeter", partial(RateMeter, clock=lambda: seconds[0]))
    loop = make_loop([ProgressCallback(stream)], tmp_path, max_steps=40)
    loop.fire("on_train_begin")
    for step in (10, 20):
        seconds[0] += 5
        loop.state.global_step = step
        loop.log({"loss": 1.0})
        if step == 10:
            seconds[0] += 30
            loop.log({"eval_loss": 1.0, "eval_runtime": 30.0})
    assert lines(stream)[1].endswith("2.00 it/s  eta 0:15")
    assert lines(stream)[3].endswith("2.00 it/s  eta 0:40")


def test_an_evaluation_alone_is_one_line(stream, tmp_path, make_loop):
    make_loop([ProgressCallback(stream)], tmp_path).evaluate()
    assert lines(stream) == ["evaluation  eval_loss 1  epoch 0  0.5 s, 64 samples/s"]


@pytest.mark.parametrize(("greater", "expected"), [(False, [0.5, 0.25]), (True, [0.5, 0.75])])
def test_an_evaluation_that_is_better_than_all_before_says_so(stream, greater, expected):
    shows = ProgressCallback(stream)
    args = SimpleNamespace(disable_tqdm=False, metric_for_best_model="f1", greater_is_better=greater)
    state = SimpleNamespace(
        is_world_process_zero=True, global_step=0, max_steps=9, num_train_epochs=1, epoch=0, best_metric=None
    )
    shows.on_train_begin(args, state, None)
    for value in (0.5, float("nan"), 0.25, 0.75, 0.5):
        shows.on_log(args, state, None, {"eval_f1": value, "eval_runtime": 1.0})
        best = state.best_metric
        if best is None or (value > best if greater else value < best):
            state.best_metric = value  # as the Trainer does, after the log
    told = [line for line in lines(stream) if line.endswith("new best")]
    assert [float(line.split("eval_f1 ")[1].split()[0]) for line in told] == expected


def test_an_evaluation_that_took_no_time_and_one_of_another_name_are_shown_as_such(stream, tmp_path, make_loop):
    loop = make_loop([ProgressCallback(stream)], tmp_path)
    loop.log({"eval_loss": 1.0, "eval_runtime": 0.0})
    loop.log({"validation_f1": 0.5, "validation_runtime": 2.0})
    assert lines(stream) == ["evaluation  eval_loss 1  0 s", "evaluation  validation_f1 0.5  2 s"]


def test_a_log_of_a_training_that_counts_tokens_has_a_runtime_and_is_shown(stream, tmp_path, make_loop):
    make_loop([ProgressCallback(stream)], tmp_path).log(
        {"loss": 0.5, "train_runtime": 4.0, "num_input_tokens_seen": 64}
    )
    assert lines(stream) == ["step 0  loss 0.5  train_runtime 4  num_input_tokens_seen 64"]


def test_an_entry_of_the_users_own_is_a_line_too(stream, tmp_path, make_loop):
    make_loop([ProgressCallback(stream)], tmp_path).log({"margin": 0.25})
    assert lines(stream) == ["step 0  margin 0.25"]


def test_metrics_that_were_not_logged_are_written_when_the_evaluation_ends(stream, tmp_path, make_loop):
    make_loop([ProgressCallback(stream)], tmp_path).fire("on_evaluate", metrics={"eval_f1": 0.5})
    assert lines(stream) == ["evaluation  eval_f1 0.5"]


def test_a_prediction_is_one_line(stream, tmp_path, make_loop):
    loop = make_loop([ProgressCallback(stream)], tmp_path)
    loop.fire("on_prediction_step", eval_dataloader=range(3))
    loop.fire("on_predict", metrics={"test_f1": 0.5, "test_runtime": 2.0})
    assert lines(stream) == ["prediction  test_f1 0.5  2 s"]


def test_the_log_entries_are_left_as_they_were(stream, tmp_path, make_loop):
    logs = {"train_runtime": 1.0, "total_flos": 3.0, "epoch": 1.0}
    loop = make_loop([ProgressCallback(stream)], tmp_path)
    loop.fire("on_train_begin")
    loop.fire("on_log", logs=logs)
    loop.fire("on_train_end")
    assert logs == {"train_runtime": 1.0, "total_flos": 3.0, "epoch": 1.0}


@pytest.mark.parametrize("settings", [{"main": False}, {"disable_tqdm": True}])
def test_other_processes_and_a_display_that_is_not_wanted_show_nothing(stream, tmp_path, make_loop, settings):
    loop = make_loop([ProgressCallback(stream)], tmp_path, **settings).train()
    loop.fire("on_prediction_step", eval_dataloader=range(3))
    loop.fire("on_predict", metrics={"test_f1": 0.5})
    assert stream.getvalue() == ""


def test_the_stream_is_looked_up_when_it_is_needed(capsys, tmp_path, make_loop):
    callback = ProgressCallback()
    make_loop([callback], tmp_path, max_steps=1).train()
    assert capsys.readouterr().err.startswith("training for 1 step,")


def test_a_reader_that_has_gone_does_not_stop_the_training(tmp_path, make_loop):
    class Gone(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

    assert make_loop([ProgressCallback(Gone())], tmp_path).train().state.global_step == 6


def test_an_open_end_has_no_percentage(stream, tmp_path, make_loop):
    loop = make_loop([ProgressCallback(stream)], tmp_path, max_steps=0)
    loop.fire("on_train_begin")
    loop.state.global_step = 7
    loop.log({"loss": 0.5})
    loop.fire("on_train_end")
    assert lines(stream)[0] == "training for an open number of steps, 2 epochs"
    assert lines(stream)[1].startswith("step 7  loss 0.5")
    assert lines(stream)[2].startswith("training finished  7 steps in ")


def test_a_training_ended_early_by_itself_names_no_error(stream, tmp_path, make_loop):
    loop = make_loop([ProgressCallback(stream)], tmp_path)
    loop.train(stop_at=3, eval_steps=0)
    loop.fire("on_train_end")
    assert lines(stream)[-1].startswith("training stopped at step 3/6 (50%) after ")


def test_a_line_break_in_the_name_of_a_metric_forges_no_line(stream, tmp_path, make_loop):
    loop = make_loop([ProgressCallback(stream)], tmp_path)
    loop.log({"loss": 0.5, "x\ntraining finished  6 steps": 1})
    assert stream.getvalue() == "step 0  loss 0.5  x\\ntraining finished  6 steps 1\n"
