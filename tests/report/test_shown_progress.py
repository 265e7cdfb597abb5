"""What a person sees of a training while it runs: in tmux, in a pipe, and in a notebook that nbconvert executes."""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

LIMIT_S = 240
BAR = re.compile(r"^(\w+) +[━╸─]{10,}  +\d+/\d+ ")
FIGURES = re.compile(r"\b(epoch|loss|grad norm|lr|best eval_loss|memory|peak) \S|(samples|tokens)/s  ")

SCRIPT = """
import sys, time, torch
from torch import nn
from tr_core import Trainer, TrainingArguments

class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 400

    def __getitem__(self, index):
        time.sleep(0.004)
        return {"input_ids": torch.full((16,), index % 50), "labels": torch.tensor(index % 2)}

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(50, 8), nn.Linear(8, 2)

    def forward(self, input_ids, labels=None):
        logits = self.head(self.embedding(input_ids).mean(1))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}

torch.manual_seed(0)
args = TrainingArguments(
    output_dir=sys.argv[1] if len(sys.argv) > 1 and "ipykernel" not in sys.argv[0] else "out",
    num_train_epochs=2, per_device_train_batch_size=4, logging_steps=20, eval_strategy="steps", eval_steps=100,
    save_steps=100, use_cpu=True, include_num_input_tokens_seen="all", load_best_model_at_end=True,
    torch_compile=True, torch_compile_backend="aot_eager", metric_for_best_model="eval_loss",
)
evaluated = torch.utils.data.Subset(Rows(), range(200))
trainer = Trainer(Model(), args, train_dataset=Rows(), eval_dataset=evaluated)
trainer.train()
"""


def environment(**more):
    drop = ("CI", "COLUMNS", "LINES", "NO_COLOR", "RANK", "WORLD_SIZE", "TMUX", "STY", "XTERM_VERSION")
    return {name: value for name, value in os.environ.items() if name not in drop} | more


class Tmux:
    """A window of tmux that runs the script, and then says its exit code.

    Args:
        folder: the script's working directory.
        columns: width of the window.
        lines: height of the window.
    """

    def __init__(self, folder, columns, lines):
        self.socket = Path(tempfile.mkdtemp(prefix="tr", dir="/tmp")) / "s"
        (folder / "script.py").write_text(SCRIPT, "utf-8")
        known = environment(PYTHONPATH=os.pathsep.join(sys.path), PYTHONWARNINGS="error", LC_ALL="C.UTF-8")
        command = f"{sys.executable} script.py {folder}/out; echo exit code $?; sleep {LIMIT_S}"
        size = ["-x", str(columns), "-y", str(lines)]
        self.tmux("-f", "/dev/null", "new-session", "-d", *size, "-c", str(folder), command, env=known)

    def tmux(self, *words, **options):
        done = subprocess.run(
            ["tmux", "-u", "-S", str(self.socket), *words], capture_output=True, text=True, timeout=30, **options
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def screen(self, *, history=False):
        text = self.tmux("capture-pane", "-p", *(["-J", "-S", "-"] if history else []))
        return [line.rstrip() for line in text.rstrip("\n").split("\n")]

    def watch(self, until, seen=lambda lines: None):
        """Look at the screen until a condition on its lines holds, and return these."""
        begun_s = time.monotonic()
        while time.monotonic() - begun_s < LIMIT_S:
            lines = self.screen()
            if until(lines):
                return lines
            seen(lines)
            time.sleep(0.05)
        raise AssertionError("not seen in time; the screen is:\n" + "\n".join(lines))

    def close(self):
        self.tmux("kill-server")
        shutil.rmtree(self.socket.parent, ignore_errors=True)


@pytest.fixture
def window(tmp_path):
    if shutil.which("tmux") is None:
        pytest.skip("needs tmux")
    opened = []

    def open_window(columns, lines=24):
        opened.append(Tmux(tmp_path, columns, lines))
        return opened[-1]

    yield open_window
    for each in opened:
        each.close()


def is_over(lines):
    return any(line.startswith("exit code") for line in lines)


def bars(lines):
    return [match[1] for line in lines if (match := BAR.match(line))]


def left(lines):
    """Return what should have been taken away."""
    return [line for line in lines if BAR.match(line) or re.search("[━─]{3}", line) or line.startswith("peak ")]


@pytest.mark.parametrize("columns", [80, 200])
def test_a_window_shows_bars_and_figures_that_neither_wrap_nor_stay(window, columns):
    tmux, screens = window(columns), []
    end = tmux.watch(is_over, screens.append)
    drawn = [lines for lines in screens if bars(lines)]
    assert {name for lines in drawn for name in bars(lines)} >= {"training", "evaluating"}
    assert all(len(set(bars(lines))) == len(bars(lines)) <= 2 for lines in drawn), drawn
    for lines in drawn:
        below = lines[max(i for i, line in enumerate(lines) if BAR.match(line)) + 1 :]
        assert len(below) <= 3
        assert all(len(line) < columns and FIGURES.search(line + "  ") for line in below), below
    latest = " ".join(drawn[-1])
    for figure in (r"loss 0\.\d+", r"grad norm \d", r"lr \d", r"epoch [012]\.\d\d/2", r"best eval_loss 0\.\d+",
                   r"\d samples/s", r"\dk? tokens/s", r"memory \d+ [MG]B"):  # fmt: skip
        assert re.search(figure, latest), (figure, drawn[-1])
    assert any("eta 0:" in line for lines in drawn for line in lines)
    assert left(end) == []
    assert end[-1] == "exit code 0"
    assert tmux.tmux("display", "-p", "#{cursor_flag}").strip() == "1"
    text = "\n".join(tmux.screen(history=True))
    assert [int(step) for step in re.findall(r"^step (\d+)/200 \(\d+%\)  loss", text, re.M)] == [*range(20, 201, 20)]
    assert len(re.findall("^training finished  200 steps", text, re.M)) == 1


def test_a_window_that_is_resized_keeps_one_bar_and_nothing_is_left_of_it(window):
    tmux = window(120, 8)
    tmux.watch(lambda lines: any(line.startswith("step 60/") for line in lines))  # the screen is full
    for columns in (60, 100, 48, 80):
        tmux.tmux("resize-window", "-x", str(columns), "-y", "8")
        lines = tmux.watch(lambda lines, most=columns: bars(lines) and max(map(len, lines)) <= most)
        assert len(bars(lines)) <= 2
    tmux.watch(is_over)
    tmux.tmux("resize-window", "-x", "200", "-y", "8")
    assert left(tmux.screen(history=True)) == []


def test_ctrl_c_leaves_a_clean_terminal(window):
    tmux = window(80)
    tmux.watch(lambda lines: any(line.startswith("step 40/") for line in lines))
    tmux.tmux("send-keys", "C-c")
    tmux.watch(lambda lines: any(line.startswith("training stopped") for line in lines))
    end = tmux.watch(lambda lines: left(lines) == [])
    assert any(line.startswith("SIGINT: saving and stopping when this step is done") for line in end)
    assert tmux.tmux("display", "-p", "#{cursor_flag}").strip() == "1"


def test_a_pipe_gets_one_line_a_log_and_no_code_of_a_terminal(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT, "utf-8")
    command = f"{sys.executable} script.py {tmp_path}/out 2>&1 | cat"
    known = environment(PYTHONPATH=os.pathsep.join(sys.path))
    done = subprocess.run(command, shell=True, capture_output=True, text=True, cwd=tmp_path, env=known, timeout=LIMIT_S)
    assert "\x1b" not in done.stdout
    assert "\r" not in done.stdout
    logs = re.findall(r"^step (\d+)/200 \(\d+%\)  loss 0\.\d+  .*(?:it/s|s/it).*$", done.stdout, re.M)
    assert [int(step) for step in logs] == [*range(20, 201, 20)]
    assert left(done.stdout.split("\n")) == []


def test_a_notebook_has_one_output_with_curve_and_table(tmp_path):
    if find_spec("nbconvert") is None or find_spec("ipykernel") is None:
        pytest.skip("nox -s report installs nbconvert and ipykernel")
    cells = [SCRIPT, "trainer.evaluate()"]
    notebook = {
        "cells": [
            {"cell_type": "code", "id": str(n), "metadata": {}, "source": cell, "outputs": [], "execution_count": None}
            for n, cell in enumerate(cells)
        ],
        "metadata": {"kernelspec": {"name": "python3", "display_name": "Python 3"}},
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    (tmp_path / "run.ipynb").write_text(json.dumps(notebook), "utf-8")
    execute = [sys.executable, "-m", "nbconvert", "--to", "notebook", "--execute", "run.ipynb", "--output", "done"]
    known = environment(PYTHONPATH=os.pathsep.join(sys.path), IPYTHONDIR=str(tmp_path / "ipython"))
    done = subprocess.run(execute, cwd=tmp_path, env=known, timeout=LIMIT_S, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    training, evaluation = (
        ["".join(output["data"]["text/html"]) for output in cell["outputs"] if output["output_type"] == "display_data"]
        for cell in json.loads((tmp_path / "done.ipynb").read_text("utf-8"))["cells"]
    )
    (html,) = training
    assert "training finished  200 steps" in html
    assert html.count("<polyline") == 2
    assert "<pre" not in html
    assert re.findall(r"<tr><td[^>]*>(\d+)<", html) == [str(step) for step in range(200, 0, -20)]
    assert len(evaluation) == 1
    assert "eval_loss" in evaluation[0]
