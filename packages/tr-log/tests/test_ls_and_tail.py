"""What state a run is in, the list of runs, and the end of a run's log."""

import io
import json
import os
import sys
import threading
import time

import pytest

from tr_log.report import ls, tail
from tr_log.report.run_folder import RunFolder
from tr_log.testing import ALIVE, KILLED_ONCE, end_event, start_event, time_event, write_run

LIMIT_S = 30
NOW_S = time.time()


@pytest.mark.parametrize(
    ("events", "status"),
    [
        ([start_event(1.0), end_event(2.0, 100)], "finished"),
        ([start_event(1.0), end_event(2.0, 7, "failed", error="ValueError: x")], "failed"),
        ([start_event(1.0), end_event(2.0, 7), start_event(3.0)], "killed"),
        ([start_event(1.0)], "killed"),
        ([start_event(1.0, **ALIVE)], "running"),
        ([start_event(1.0, **ALIVE), start_event(2.0)], "killed"),
        ([start_event(1.0, **{**ALIVE, "pid_started": 1})], "killed"),  # another process has got the number
        ([start_event(1.0, **{**ALIVE, "pid": 2**22 + 5})], "killed"),
        # On another machine, whose clock may differ.
        ([start_event(NOW_S - 60)], "running"),
        ([start_event(NOW_S + 60)], "running"),
        ([start_event(NOW_S - 3600)], "killed"),
        ([start_event(NOW_S + 3600)], "killed"),
        ([start_event(NOW_S - 5000), time_event(NOW_S - 3000, 1), time_event(NOW_S - 1500, 2)], "running"),
        ([], "unknown"),
    ],
)
def test_a_run_has_a_state(tmp_path, events, status):
    run = RunFolder.read(write_run(tmp_path, events, [{"step": 3, "loss": 1.0}]))
    assert run.status == status


def test_runs_are_listed_with_state_step_loss_and_best(tmp_path, capsys):
    write_run(tmp_path / "group" / "a", KILLED_ONCE, [{"step": 100, "loss": 0.5}, {"step": 100, "eval_loss": 0.25}])
    write_run(tmp_path / "group" / "b", [start_event(1.0, **ALIVE)])
    assert ls.main([str(tmp_path)]) == 0
    head, *rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert head[:3] == ["run", "state", "step"]
    states = {row[0].rpartition("/")[2]: row[1:3] for row in rows}
    assert states == {"a": ["finished", "100/100"], "b": ["running", "0/100"]}
    assert "loss 0.25 (step 100)" in " ".join(map(" ".join, rows))
    assert ls.main([str(tmp_path / "nowhere")]) == 1


def test_the_tail_of_a_run_ends_with_how_it_ended(tmp_path, capsys):
    write_run(
        tmp_path,
        [start_event(1.0), end_event(2.0, 3, "failed", error="ValueError: x")],
        [{"step": n, "loss": n} for n in (1, 2)],
    )
    assert tail.main([str(tmp_path), "-n", "1", "-f"]) == 0
    assert capsys.readouterr().out == "step 2  loss 2\nfailed at step 3/100 (3%): ValueError: x\n"
    assert tail.main([str(tmp_path / "nowhere")]) == 1


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(
    ("columns", "heads"),
    [
        (200, "run state step loss best last news"),
        (80, "run state step loss last news"),
        (50, "run state step last news"),
        (38, "run state last news"),
        (10, "run state"),
    ],
)
def test_a_list_fits_the_terminal(tmp_path, monkeypatch, columns, heads):
    entries = [{"step": 100, "loss": 0.5}, {"step": 100, "eval_matthews_correlation": 0.25}]
    best = {"metric_for_best_model": "matthews_correlation"}
    write_run(tmp_path / "a_long_name" / "run", [start_event(1.0, arguments=best), end_event(2.0, 100)], entries)
    monkeypatch.setattr("sys.stdout", Terminal())
    monkeypatch.setenv("COLUMNS", str(columns))
    assert ls.main([str(tmp_path)]) == 0
    lines = sys.stdout.getvalue().splitlines()
    assert " ".join(lines[0].split()) == heads
    assert lines[1].partition("  ")[0].endswith("run"[-max(columns - 60, 1) :])
    assert columns < 20 or max(map(len, lines)) <= columns


def test_a_folder_that_cannot_be_read_hides_no_run(tmp_path, capsys, monkeypatch):
    write_run(tmp_path / "b", KILLED_ONCE)
    (tmp_path / "a" / "inner").mkdir(parents=True)
    real = os.scandir

    def refuse(path):
        if str(path).endswith("inner"):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", refuse)
    monkeypatch.setattr(os, "listdir", lambda path=".": [entry.name for entry in refuse(path)])
    assert ls.main([str(tmp_path)]) == 0
    assert "finished" in capsys.readouterr().out


def test_of_several_runs_the_tail_asks_for_one(tmp_path, capsys):
    write_run(tmp_path / "a", KILLED_ONCE, [{"step": 1, "loss": 1}])
    assert tail.main([str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith("step 1  loss 1")
    write_run(tmp_path / "b", KILLED_ONCE)
    assert tail.main([str(tmp_path)]) == 1
    assert "holds 2 runs; give one of them:" in capsys.readouterr().err


def append(path, *items):
    with path.open("a") as file:
        file.write("".join(json.dumps(item) + "\n" for item in items))


def test_a_tail_follows_a_run_over_half_a_line_and_a_restart(tmp_path, monkeypatch):
    folder = write_run(tmp_path, [start_event(1.0)], [{"step": n, "loss": n / 4} for n in (1, 2, 3)])
    printed = Terminal()
    monkeypatch.setattr("sys.stdout", printed)
    thread = threading.Thread(target=tail.main, args=([str(folder), "-F", "--every", "0.02"],), daemon=True)
    thread.start()

    def wait_for(text):
        end_s = time.monotonic() + LIMIT_S
        while text not in printed.getvalue():
            assert time.monotonic() < end_s, printed.getvalue()
            time.sleep(0.01)

    wait_for("killed at step 3/100")
    with (folder / "metrics.jsonl").open("a") as file:  # half a line, which the next run removes
        file.write('{"step": 4, "lo')
    kept = [{"step": 1, "loss": 0.25}, {"step": 2, "loss": "NaN"}]
    write_run(folder, entries=kept)
    append(folder / "events.jsonl", start_event(3.0, 1, **ALIVE))
    wait_for("resumed from step 1\n")
    wait_for("step 2  loss nan\n")
    append(folder / "metrics.jsonl", {"step": 3, "loss": 0.5})
    wait_for("step 3  loss 0.5\n")
    append(folder / "events.jsonl", end_event(4.0, 100))
    thread.join(LIMIT_S)
    assert not thread.is_alive()
    lines = printed.getvalue().splitlines()
    assert lines[:4] == ["step 1  loss 0.25", "step 2  loss 0.5", "step 3  loss 0.75", "killed at step 3/100 (3%)"]
    assert lines[-1] == "finished at step 100/100 (100%)"
