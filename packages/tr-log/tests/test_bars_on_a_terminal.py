"""What a person sees: each test runs a program in a pseudo-terminal and looks at the display it leaves."""

import re

import pytest

from tr_log.layout import Layout

pytest.importorskip("pty", reason="needs pseudo-terminals")

TRAINING = """
import sys, time, logging
from loop import Loop
from tr_log import ProgressCallback, get_logger
loop = Loop([ProgressCallback()], "unused", max_steps=40, pause=lambda: time.sleep(0.008))
{before}
loop.train(logging_steps=10, eval_steps=20{how})
{after}
"""


def training(terminal, before="", how="", after="", **settings):
    return terminal.run(TRAINING.format(before=before, how=how, after=after), **settings)


@pytest.fixture(scope="module")
def display(terminal):
    """The display after one plain training, long enough for some drawings."""
    return training(terminal, "loop.pause = lambda: time.sleep(0.03)")


def test_a_log_entry_is_in_columns_and_broken_between_its_values():
    layout = Layout()
    assert layout.entry(["step 1/9", "loss 0.512", "lr 0.1"], 80) == ["step 1/9  loss 0.512  lr 0.1"]
    assert layout.entry(["step 2/9", "loss 0.5", "lr 0.1"], 80) == ["step 2/9  loss 0.5    lr 0.1"]
    assert layout.entry(["step 3/9", "loss 0.5", "lr 0.1", "epoch 1"], 20) == [
        "step 3/9  loss 0.5",
        "    lr 0.1  epoch 1",
    ]


def test_log_lines_stay_and_bars_are_taken_away(display):
    lines = display.shown
    assert lines[0] == "training for 40 steps, 2 epochs"
    assert lines[1] == "step 10/40 (25%)  loss 0.1  grad_norm 1.25  lr 0.0001  epoch 0.5"
    assert lines[3] == "step 20/40 (50%)  evaluation  eval_loss 0.04762  epoch 1    0.5 s, 64 samples/s"
    assert lines[7].startswith("training finished  40 steps in 0:0")
    assert lines[7].endswith("32 samples/s  train_loss 0.5")
    assert len(lines) == 8
    assert display.code == 0


def test_the_bar_shows_position_speed_and_time_left_and_the_line_below_the_latest_figures(display):
    bars = [frame for frame in display.frames if frame.startswith("training ") and "━" in frame]
    assert any(" 40/40  100%" in bar for bar in bars)
    later = next(bar for bar in bars if "it/s" in bar and "eta" in bar)
    for piece in ("━", "/40  ", "%  ", " it/s", "eta 0:0"):
        assert piece in later
    # Of whichever step the drawing comes to: on a busy machine it is a later one.
    figures = re.compile(r"loss 0\.\d+ +grad norm 1\.25  lr 0\.000[1-4]  epoch \d")
    assert any(figures.match(frame) for frame in display.frames)


def test_an_evaluation_has_a_bar_of_its_own_below_that_of_the_training(display):
    evaluating = [frame for frame in display.frames if frame.startswith("evaluating ")]
    assert any("  0/3    0%" in frame for frame in evaluating)
    assert not any("evaluating" in line for line in display.lines)


def test_the_cursor_is_given_back(display):
    assert "\x1b[?25l" in display.output
    assert display.cursor_is_shown


def test_an_error_in_the_training_takes_the_bars_away_before_the_traceback(terminal):
    display = training(terminal, how=", stop_at=15, error=KeyError('boom')")
    lines = display.shown
    stopped = next(
        i for i, line in enumerate(lines) if line.startswith("training stopped by KeyError at step 15/40 (37%) after")
    )
    assert lines[stopped + 1] == "Traceback (most recent call last):"
    assert lines[-1] == "KeyError: 'boom'"
    assert display.cursor_is_shown
    assert not any("━" in line or "─" in line for line in lines)


def test_an_error_in_an_evaluation_alone_gives_the_terminal_back_at_exit(terminal):
    display = terminal.run(
        "from loop import Loop, Loader\nfrom tr_log import ProgressCallback\n"
        "loop = Loop([ProgressCallback()], 'unused')\n"
        "loop.fire('on_prediction_step', eval_dataloader=Loader(5))\n"
        "raise KeyError('boom')\n"
    )
    lines = display.shown
    assert lines[0] == "Traceback (most recent call last):"
    assert "KeyError: 'boom'" in lines
    assert display.cursor_is_shown
    assert not any("evaluating" in line for line in lines)


def test_what_the_script_prints_and_logs_stands_above_the_bar_on_lines_of_its_own(terminal):
    before = """
logging.basicConfig(format="%(levelname)s - %(name)s - %(message)s", handlers=[logging.StreamHandler(sys.stdout)])
def pause():
    time.sleep(0.008)
    if loop.state.global_step == 15:
        print("printed [bold]as it is[/bold] :smile:")
        logging.getLogger("mine").warning("logged with [rank 1/4]")
        sys.stderr.write("half a "); sys.stderr.write("line\\n")
        sys.stderr.write("\\r 10% of another bar"); sys.stderr.write("\\r100% of another bar\\n")
loop.pause = pause
"""
    display = training(terminal, before)
    lines = display.shown
    first = lines.index("printed [bold]as it is[/bold] :smile:")
    assert lines[first + 1 : first + 4] == [
        "WARNING - mine - logged with [rank 1/4]",
        "half a line",
        "100% of another bar",
    ]
    assert len([line for line in lines if "another bar" in line]) == 1


def test_streams_and_handlers_are_what_they_were_after_the_training(terminal):
    before = "handler = logging.StreamHandler(sys.stdout); logging.getLogger().addHandler(handler); out = sys.stdout"
    after = "assert sys.stdout is out and handler.stream is out, (sys.stdout, handler.stream); print('the same')"
    assert "the same" in training(terminal, before, after=after).shown


def test_handlers_that_look_their_stream_up_each_time_are_left_alone(terminal):
    before = "logging.getLogger('mine').addHandler(logging.lastResort)"  # as torch does with its own
    pause = "\nloop.pause = lambda: (time.sleep(0.008), logging.getLogger('mine').warning('seen'))"
    display = training(terminal, before + pause, after="logging.getLogger('mine').warning('seen at the end')")
    assert (display.code, display.shown[-1]) == (0, "seen at the end")
    assert "seen" in display.shown
    assert not any("seen" in line and "training" in line for line in display.shown)


def test_a_stream_taken_during_the_training_works_after_it(terminal):
    before = "taken = []\nloop.pause = lambda: (time.sleep(0.008), taken.append(sys.stdout))"
    display = training(terminal, before, after="taken[20].write('still here')")
    assert "still here" in display.shown


def test_a_forked_worker_prints_without_drawing_bars(terminal):
    script = """
import os, sys
from tr_log import progress_bar
with progress_bar("working", 10):
    if os.fork() == 0:
        print("from the worker", flush=True)
        os._exit(0)
    os.wait()
"""
    output = terminal.run(script).output
    assert output.count("from the worker") == 1
    assert not output.partition("from the worker")[0].endswith("\x1b[2K")


@pytest.mark.parametrize("columns", [20, 60, 200])
def test_a_bar_never_breaks_the_line_however_narrow_the_terminal(terminal, columns):
    script = """
import time
from tr_log import progress
for _ in progress(range(30), description="skipping data"):
    time.sleep(0.008)
"""
    display = terminal.run(script, columns=columns)  # the display refuses a character beyond its edge
    assert any("skipping data" in frame for frame in display.frames)
    assert display.shown == [""]


def test_the_bar_keeps_its_length_while_the_numbers_change(terminal):
    script = """
import time
from tr_log import progress
for _ in progress(range(40), description="counting"):
    time.sleep(0.03)
"""
    display = terminal.run(script, columns=70)
    lengths = [sum(map(frame.count, "━╸─")) for frame in display.frames if "it/s" in frame]
    assert lengths == sorted(lengths, reverse=True)
    assert min(lengths) >= 10


def test_work_inside_a_training_is_shown_on_the_same_screen(terminal):
    before = """
from tr_log import progress
def begin(*a, **k):
    for _ in progress(range(12), description="passing over data"):
        time.sleep(0.008)
class Skipping:
    on_epoch_begin = begin
loop.callbacks.append(Skipping()); train_begin = loop.callbacks[0].on_train_begin
loop.callbacks[0].on_train_begin = lambda *a, **k: (train_begin(*a, **k), begin())
"""
    display = training(terminal, before)
    assert any(frame.startswith("passing over data") for frame in display.frames)
    assert display.shown[1].startswith("step 10/40")


def test_what_is_under_way_is_the_name_of_the_bar_and_work_after_the_training_has_a_bar_of_its_own(terminal):
    before = """
from tr_log.phases import CHECKPOINT, EXCHANGE, doing, phase, phase_clock
clock = phase_clock(); clock.__enter__()
def pause():
    time.sleep(0.02)
    words = {0: "compiling"}.get(loop.state.global_step)
    with doing(words) if words else phase({20: CHECKPOINT, 30: EXCHANGE}.get(loop.state.global_step, "data")):
        time.sleep(0.1 if loop.state.global_step in (0, 20, 30) else 0)
loop.pause = pause
"""
    after = "with doing('uploading'): print('waits')"
    display = training(terminal, before, after=after)
    names = {frame.split()[0] for frame in display.frames if "━" in frame or "─" in frame}
    assert names >= {"starting", "compiling", "saving", "training"}
    assert display.shown[-1] == "waits"
    assert "uploading" in display.output.partition("training finished")[2]


def test_figures_are_those_that_are_known(terminal):
    before = """
from tr_log.phases import active_clock, phase_clock
clock = phase_clock(); clock.__enter__()
rates = {"samples_per_second": 812.3, "tokens_per_second": 52345.0, "memory_peak_bytes": 14.1e9}
active_clock().rates = rates if sys.argv[1] == "some" else rates | {"mfu": 0.412, "memory_bytes": 12.3e9}
loop.args.metric_for_best_model, loop.state.best_metric = "eval_f1", 0.875
loop.pause = lambda: time.sleep(0.02)
"""
    known = "epoch {}/2  best eval_f1 0.875  812 samples/s  52.3k tokens/s"
    for which, figures in (("some", "  peak 14.1 GB"), ("all", "  MFU 41.2%  memory 12.3 GB  peak 14.1 GB")):
        display = terminal.run(TRAINING.format(before=before, how="", after=""), which, columns=150)
        lines = [frame.rstrip() for frame in display.frames if "tokens/s" in frame]
        assert lines
        assert all(line.endswith(known.format(line.partition("epoch ")[2][:4]) + figures) for line in lines)


def test_the_beginning_of_a_line_is_seen_above_the_bar_before_its_end(terminal):
    before = """
def pause():
    time.sleep(0.02)
    if loop.state.global_step == 15:
        print("asking ... ", end="", flush=True); time.sleep(0.25)
        for i in range(40):
            sys.stderr.write(f"\\r{i} of 40 by another bar"); time.sleep(0.01)
        print("answered")
loop.pause = pause
"""
    display = training(terminal, before)
    assert "asking ... " in display.frames or any(frame.startswith("asking ...") for frame in display.frames)
    assert any(frame.endswith("of 40 by another bar") for frame in display.frames)
    assert "asking ... answered" in display.shown
    assert not any("of 40" in line for line in display.shown[:-1])


LIVE = """
from rich.live import Live
from rich.progress import Progress
from tr_log.terminal import StreamRedirect
def theirs():
    with Progress() as progress:
        task = progress.add_task("theirs", total=10)
        for i in range(10):
            time.sleep(0.03)
            progress.advance(task)
            if i == 5:
                print("printed inside"); loop.log({"loss": 7.0})
"""


def test_a_live_display_of_the_script_has_the_terminal_while_it_is_shown(terminal):
    before = LIVE + "loop.pause = lambda: (time.sleep(0.02), theirs() if loop.state.global_step == 15 else None)"
    display = training(terminal, before)
    during = display.output.partition("theirs")[2].partition("100%")[0]
    assert "training" not in during
    lines = [line.split("━")[0].rstrip() for line in display.shown]
    first = lines.index("printed inside")
    assert lines[first + 1] == "step 15/40 (37%)  loss 7"
    assert lines[first + 2] == "theirs"
    assert lines[first + 3].startswith("step 20/40")
    assert display.cursor_is_shown
    assert "training" in display.output.partition("100%")[2]


def test_a_training_inside_a_live_display_of_the_script_is_lines_above_it(terminal):
    script = f"""
import sys, time
from loop import Loop
from tr_log import ProgressCallback
loop = Loop([ProgressCallback()], "unused", max_steps=40)
{LIVE}
with Live("theirs"):
    loop.train(logging_steps=20)
"""
    display = terminal.run(script)
    lines = display.shown
    assert lines[0] == "training for 40 steps, 2 epochs"
    assert lines[-1] == "theirs"
    assert lines[-2].startswith("training finished")
    assert display.code == 0


def test_bars_that_move_the_cursor_themselves_are_left_alone(terminal):
    """As tqdm's nested bars do."""
    before = """
def pause():
    time.sleep(0.02)
    if loop.state.global_step == 15:
        for i in range(10):
            sys.stderr.write(f"\\router {i}\\n\\rinner {i}\\x1b[A"); time.sleep(0.03)
        sys.stderr.write("\\n\\n")
    if loop.state.global_step == 25:
        time.sleep(1.1)
loop.pause = pause
"""
    display = training(terminal, before)
    first = display.shown.index("outer 9")
    assert display.shown[first + 1] == "inner 9"
    assert display.shown[first + 2].startswith("step 20/40")
    assert sum(line.startswith(("outer", "inner")) for line in display.shown) == 2


def test_where_output_goes_to_a_file_it_still_does_while_a_bar_is_drawn(terminal, tmp_path):
    before = f"""
sys.stdout = open({str(tmp_path / "out")!r}, "w", buffering=1)
loop.pause = lambda: (time.sleep(0.008), print("x"))
"""
    display = training(terminal, before)
    assert set((tmp_path / "out").read_text().split()) == {"x"}
    assert not any(line.rstrip() == "x" for line in display.lines)


@pytest.mark.parametrize("environment", [{"CI": "true"}, {"TERM": "dumb"}])
def test_no_bars_on_a_build_server_or_a_terminal_that_cannot_redraw(terminal, environment):
    display = training(terminal, environment=environment)
    assert "\x1b" not in display.output
    assert "step 40/40 (100%)" in display.output


def test_a_terminal_without_unicode_gets_a_plain_bar(terminal):
    display = training(terminal, environment={"PYTHONIOENCODING": "ascii"})
    assert display.code == 0
    assert any("###" in frame and "---" in frame for frame in display.frames)


def test_several_evaluations_and_trainings_in_one_process_each_draw_their_own_bars(terminal):
    display = training(
        terminal,
        after="loop.evaluate(); loop.evaluate(sized=False); loop.train(logging_steps=20, eval_steps=0)",
    )
    lines = display.shown
    assert sum(line.startswith("training finished") for line in lines) == 2
    assert sum("evaluation" in line for line in lines) == 4
    assert display.cursor_is_shown
