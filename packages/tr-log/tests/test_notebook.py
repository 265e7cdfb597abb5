"""What a notebook shows; tests/report executes a real one."""

import re
import sys
import types

import pytest

from tr_log import ProgressCallback, progress, progress_bar
from tr_log.notebook import NotebookOutput, in_notebook, ticks


class Output:
    """An output of a cell: what was shown at first, and every change."""

    def __init__(self, content):
        self.contents = [content]

    def update(self, content, *, raw):
        assert raw
        self.contents.append(content)

    @property
    def html(self):
        return self.contents[-1]["text/html"]


class ZMQInteractiveShell:
    """Stands for the shell of a notebook's kernel, which is known by its name."""

    execution_count = 1


@pytest.fixture
def outputs(monkeypatch):
    """Be in a notebook, and return its outputs."""
    shown = []

    def display(content, *, raw, display_id):
        assert raw
        assert display_id
        shown.append(Output(content))
        return shown[-1]

    package, module = types.ModuleType("IPython"), types.ModuleType("IPython.display")
    package.get_ipython, module.display = ZMQInteractiveShell, display
    monkeypatch.setitem(sys.modules, "IPython", package)
    monkeypatch.setitem(sys.modules, "IPython.display", module)
    monkeypatch.setattr("tr_log.notebook.SECONDS_BETWEEN_UPDATES", 0.0)
    monkeypatch.setattr(NotebookOutput, "_newest", None)
    return shown


def rows(html):
    return [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in re.findall(r"<tr>(<td.*?)</tr>", html)]


def test_a_script_and_a_terminal_are_no_notebook(monkeypatch):
    monkeypatch.delitem(sys.modules, "IPython", raising=False)
    assert not in_notebook()
    package = types.ModuleType("IPython")
    package.get_ipython = lambda: None  # imported, but not running
    monkeypatch.setitem(sys.modules, "IPython", package)
    assert not in_notebook()
    package.get_ipython = type("TerminalInteractiveShell", (), {})
    assert not in_notebook()


def test_a_training_is_one_output_that_changes_in_place(outputs, tmp_path, make_loop, capsys):
    make_loop([ProgressCallback()], tmp_path).train()
    (output,) = outputs
    assert len(output.contents) > 6
    assert capsys.readouterr() == ("", "")
    assert re.match(r"training finished  6 steps in 0:00 ", output.contents[-1]["text/plain"])


def test_while_it_trains_bars_and_figures_are_above_the_curve(outputs, tmp_path, make_loop):
    make_loop([ProgressCallback()], tmp_path).train()
    during = [content["text/html"] for content in outputs[0].contents if "<pre" in content["text/html"]]
    assert any("training" in html and "3/6" in html for html in during)
    assert any("evaluating" in html and "2/3" in html for html in during)
    assert any("grad norm" in html and "<svg" in html for html in during)
    assert "<pre" not in outputs[0].html


def test_the_table_has_a_row_for_every_step_with_a_log_the_newest_first(outputs, tmp_path, make_loop):
    make_loop([ProgressCallback()], tmp_path, max_steps=4).train()
    html = outputs[0].html
    assert re.findall(r"<th [^>]*>(.*?)</th>", html) == ["step", "loss", "grad_norm", "lr", "epoch", "eval_loss"]
    assert rows(html) == [
        ["4", "0.25", "1.25", "4e-05", "2.00", "0.2"],
        ["3", "0.3333", "1.25", "3e-05", "1.50", ""],
        ["2", "0.5", "1.25", "2e-05", "1.00", "0.3333"],
        ["1", "1", "1.25", "1e-05", "0.50", ""],
    ]


def test_the_curves_grow_with_the_logs(outputs, tmp_path, make_loop):
    make_loop([ProgressCallback()], tmp_path).train()
    points = [
        len(lines[0].split()) if (lines := re.findall(r'points="(.*?)"', content["text/html"])) else 0
        for content in outputs[0].contents
    ]
    assert points == sorted(points)
    assert points[-1] == 6
    assert len(re.findall("<polyline", outputs[0].html)) == 2  # loss and eval_loss


def test_a_hundred_thousand_logs_are_shown_by_a_short_output(outputs):
    output = NotebookOutput()
    output._entries = {step: {"loss": 1 / (1 + step % 7), "epoch": step / 10} for step in range(100_000)}
    output.write("done")
    assert len(outputs[0].html) < 60_000
    assert len(rows(outputs[0].html)) == 100
    assert "the last 100 of 100000" in outputs[0].html


def test_values_that_are_not_finite_are_in_the_table_and_not_in_the_curve(outputs):
    output = NotebookOutput()
    for step, loss in enumerate([1.0, float("nan"), float("inf"), 0.5]):
        output.log("", step, {"loss": loss})
    assert [row[1] for row in rows(outputs[0].html)] == ["0.5", "inf", "nan", "1"]
    assert len(re.search(r'points="(.*?)"', outputs[0].html)[1].split()) == 2


def test_names_and_messages_are_text_and_no_html(outputs):
    output = NotebookOutput()
    output.write("<script>")
    output.log("", 1, {"<b>": "<i>"})
    assert "<script>" not in outputs[0].html
    assert "&lt;b&gt;" in outputs[0].html
    assert "<i>" not in outputs[0].html


def test_an_evaluation_alone_is_a_table_and_the_next_one_an_output_of_its_own(outputs, tmp_path, make_loop):
    loop = make_loop([ProgressCallback()], tmp_path)
    loop.evaluate()
    loop.evaluate()
    first, second = outputs
    assert rows(first.html) == rows(second.html) == [["0", "0.00", "1"]]
    assert "<pre" not in first.html


def test_a_prediction_alone_shows_its_metrics(outputs, tmp_path, make_loop):
    loop = make_loop([ProgressCallback()], tmp_path)
    loop.fire("on_prediction_step", eval_dataloader=range(3))
    loop.fire("on_predict", metrics={"test_f1": 0.5})
    (output,) = outputs
    assert output.contents[-1]["text/plain"] == "prediction  test_f1 0.5"


def test_a_training_that_fails_leaves_its_table_and_says_so(outputs, tmp_path, make_loop):
    with pytest.raises(KeyError):
        make_loop([ProgressCallback()], tmp_path).train(stop_at=2, error=KeyError("boom"))
    assert outputs[0].contents[-1]["text/plain"].startswith("training stopped by KeyError at step 2/6 (33%)")
    assert len(rows(outputs[0].html)) == 2


def test_other_work_has_a_bar_that_is_taken_away_also_within_a_training(outputs, tmp_path, make_loop, monkeypatch):
    for _ in progress(range(3), description="sorting"):
        pass
    assert any("sorting" in content["text/html"] for content in outputs[0].contents)
    assert outputs[0].html == "<div></div>"
    monkeypatch.setattr(ZMQInteractiveShell, "execution_count", 2)
    loop = make_loop([ProgressCallback()], tmp_path)
    loop.fire("on_train_begin")
    with progress_bar("skipping", 5) as bar:
        bar.advance()
    assert len(outputs) == 2
    both = [content["text/html"] for content in outputs[1].contents if "skipping" in content["text/html"]]
    assert all("starting" in html for html in both)
    loop.fire("on_train_end")


def test_what_left_nothing_in_a_cell_leaves_no_empty_output_there(outputs, tmp_path, make_loop):
    for _ in range(3):
        with progress_bar("loading"):
            pass
    make_loop([ProgressCallback()], tmp_path).train()
    make_loop([ProgressCallback()], tmp_path).train()
    assert ["training finished" in output.html for output in outputs] == [True, True]


def test_a_stream_that_was_given_gets_lines_in_a_notebook_too(outputs, tmp_path, make_loop, capsys):
    make_loop([ProgressCallback(sys.stderr)], tmp_path).train()
    assert capsys.readouterr().err.startswith("training for 6 steps, 2 epochs\nstep 1/6")
    assert outputs == []


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(0, 10, [0, 2, 4, 6, 8, 10]), (0.31, 2.4, [0.5, 1.0, 1.5, 2.0]), (-1, 1, [-1, -0.5, 0, 0.5, 1]), (3, 3, [3])],
)
def test_axes_have_round_numbers(low, high, expected):
    assert ticks(low, high) == pytest.approx(expected)
