import math
import os
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from tr_log import ReportFile
from tr_log.report.at_end import result_of, write_report
from tr_log.report.command import main as report
from tr_log.report.curves import curves, means, thin, words_of
from tr_log.report.page import page, page_data
from tr_log.report.run_folder import RunFolder
from tr_log.report.time_split import time_split, wall_time
from tr_log.testing import KILLED_ONCE, checkpoint_event, end_event, start_event, time_event, write_run


@pytest.fixture
def killed(tmp_path):
    return RunFolder.read(write_run(tmp_path / "killed", KILLED_ONCE, [{"step": 100, "loss": 0.5, "epoch": 1.0}]))


def spent(split):
    return {name: seconds for name, seconds in split.items() if seconds}


def test_the_split_sums_to_the_wall_time_across_a_restart(killed):
    split = time_split(killed.sessions)
    assert spent(split) == {
        "start": 3.0,
        "data": 2.0,
        "compute": 14.0,
        "evaluation": 1.0,
        "checkpoint": 1.0,
        "redone": 3.0,
        "idle": 7.0,
    }
    assert sum(split.values()) == wall_time(killed.sessions) == 31.0


def test_computing_has_the_exchange_of_gradients_where_that_is_not_measured(tmp_path):
    time_event = {"event": "time", "time_s": 2.0, "step": 1, "phases": {"compute": 1.0}}
    alone, unmeasured = [start_event(1.0), time_event], [start_event(1.0, world_size=2), time_event]
    measured = [start_event(1.0, world_size=2), time_event | {"measures_exchange": True}]
    runs = [RunFolder.read(write_run(tmp_path / str(n), e)) for n, e in enumerate((alone, unmeasured, measured))]
    texts = [page_data([run])["parts"][2]["text"] for run in runs]
    assert texts == ["computing", "computing, and exchanging gradients", "computing"]


def test_without_the_checkpoint_that_was_resumed_from_the_time_of_its_step_counts(tmp_path):
    events = [event for event in KILLED_ONCE if event["event"] != "checkpoint"]
    assert time_split(RunFolder.read(write_run(tmp_path, events)).sessions)["redone"] == 3.0


def test_half_a_line_and_foreign_lines_do_not_matter(tmp_path):
    folder = write_run(tmp_path, KILLED_ONCE, [{"step": 1, "loss": "NaN"}, {"loss": 3}])
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('nonsense\n[1]\n{"step": 2, "lo')
    run = RunFolder.read(folder)
    assert len(run.entries) == 1
    assert math.isnan(run.entries[0]["loss"])
    assert run.unreadable == 2


def test_a_later_session_may_go_further_back_than_the_next_one(tmp_path):
    events = [*KILLED_ONCE[:6], time_event(1024.0, 80, compute=4.0), start_event(1030.0, 0)]
    run = RunFolder.read(write_run(tmp_path, [*events, time_event(1040.0, 100, compute=10.0), end_event(1040.0, 100)]))
    split = time_split(run.sessions)
    assert spent(split) == {"start": 2.0, "compute": 10.0, "redone": 15.0, "idle": 13.0}
    assert sum(split.values()) == wall_time(run.sessions)


def test_the_split_sums_up_though_the_clocks_of_two_machines_differ(tmp_path):
    events = [*KILLED_ONCE[:5], *({**event, "time_s": event["time_s"] - 3600} for event in KILLED_ONCE[5:])]
    run = RunFolder.read(write_run(tmp_path, events))
    assert sum(time_split(run.sessions).values()) == wall_time(run.sessions) == 24.0


def test_the_page_has_the_time_of_each_process_with_its_place(tmp_path):
    rows = [{"place": "tp 0", "phases": {"compute": 3.0, "data": "?"}}, {"place": "", "phases": {"compute": 2.0}}, 7]
    run = RunFolder.read(
        write_run(tmp_path, [start_event(1.0), {"event": "processes", "time_s": 4.0, "processes": rows}])
    )
    expected = [{"name": "0 (tp 0)", "split": {"compute": 3.0}}, {"name": "1", "split": {"compute": 2.0}}]
    assert page_data([run])["runs"][0]["processes"] == expected


@pytest.mark.parametrize(
    ("name", "greater", "best"),
    [
        (None, None, ("eval_loss", 0.25, 20)),
        ("f1", None, ("eval_f1", 0.9, 30)),
        ("f1", False, ("eval_f1", 0.1, 20)),
    ],
)
def test_the_best_evaluation_is_that_of_the_arguments(tmp_path, name, greater, best):
    entries = [{"step": 10 * n, "eval_loss": loss, "eval_f1": f1} for n, loss, f1 in ((1, 0.5, 0.5), (2, 0.25, 0.1))]
    entries.append({"step": 30, "eval_loss": "NaN", "eval_f1": 0.9})
    arguments = {"metric_for_best_model": name, "greater_is_better": greater}
    run = RunFolder.read(write_run(tmp_path, [start_event(1.0, arguments=arguments)], entries))
    assert run.best() == best


def test_a_thinned_curve_keeps_first_last_and_every_extreme():
    values = [math.sin(n / 50) for n in range(100_000)]
    values[777], values[54_321], values[99_000] = 50.0, -50.0, None
    steps, thinned = thin(range(100_000), values, 2000)
    assert len(steps) <= 2000
    assert (steps[0], steps[-1]) == (0, 99_999)
    assert {777: 50.0, 54_321: -50.0, 99_000: None}.items() <= dict(zip(steps, thinned, strict=True)).items()
    assert steps == sorted(steps)


def test_a_thinned_curve_comes_with_means_of_its_parts():
    values = [float(n % 10) for n in range(1000)]
    values[:100] = [None] * 100
    steps, found = means(range(1000), values, 10)
    assert steps == [50, 150, 250, 350, 450, 550, 650, 750, 850, 950]
    assert found == [None] + [4.5] * 9


def test_curves_come_in_a_useful_order_and_leave_out_what_is_logged_once():
    entries = [
        {"step": 1, "epoch": 0.1, "grad_norm": 2, "own": 1, "loss": math.inf, "text": "x", "flag": True},
        {"step": 2, "eval_f1": 0.5, "eval_runtime": 3.0, "eval_samples_per_second": 9.0, "train_loss": 1.0},
    ]
    found = curves(entries)
    assert list(found) == ["loss", "grad_norm", "own", "eval_f1", "eval_samples_per_second"]
    assert found["loss"] == ([1], [None])


def test_rates_are_curves_without_those_of_steps_that_were_made_again(tmp_path):
    rate = {"event": "rates", "samples_per_second": 8.0, "flops_per_second": 3e12, "mfu": 0.25, "memory_bytes": 2**31}
    rates = [(1.5, 10), (1.6, 20), (1.7, 30), (3.5, 25), (3.6, 35)]
    events = [rate | {"time_s": when, "step": step, "samples_per_second": 8.0 * when} for when, step in rates]
    events += [start_event(1.0), start_event(3.0, step=20), end_event(4.0, 35), {"event": "rates", "time_s": 3.7}]
    run = RunFolder.read(write_run(tmp_path, sorted(events, key=lambda event: event["time_s"])))
    found = page_data([run])["runs"][0]["curves"]
    assert found["samples_per_second"] == {"x": [10, 20, 25, 35], "y": [12.0, 12.8, 28.0, 28.8]}
    assert (found["teraflops"]["y"][0], found["mfu"]["y"][0], found["memory"]["y"][0]) == (3.0, 25.0, 2.0)
    assert not {"tokens_per_second", "memory_peak"} & set(found)


def test_load_is_a_curve_in_per_cent(tmp_path):
    load = {"cpu": 0.5, "cpu_of_process": 0.25, "gpu": 1.0, "ram_bytes": 2**30}
    events = [start_event(1.0), *(time_event(1.0 + step, step) | {"load": load} for step in (1, 2)), end_event(4.0, 2)]
    found = page_data([RunFolder.read(write_run(tmp_path, events))])["runs"][0]["curves"]
    assert {name: found[name]["y"] for name in ("cpu", "cpu_of_process", "gpu", "ram")} == {
        "cpu": [50.0, 50.0],
        "cpu_of_process": [25.0, 25.0],
        "gpu": [100.0, 100.0],
        "ram": [1.0, 1.0],
    }


@pytest.mark.slow
def test_a_page_of_100_000_steps_is_at_most_half_a_megabyte(tmp_path):
    names = ("loss", "learning_rate", "grad_norm", *(f"own_{n}" for n in range(10)))
    entries = [{"step": n, "epoch": n / 1000, **{name: n / 7 for name in names}} for n in range(100_000)]
    text = page([RunFolder.read(write_run(tmp_path, KILLED_ONCE, entries))])
    assert len(text.encode()) < 500_000


def test_a_page_of_many_restarts_and_runs_is_at_most_half_a_megabyte(tmp_path):
    arguments = {"arguments": {f"argument_{n}": "x" * 20 for n in range(130)}}
    runs = []
    for number in range(10):
        events = []
        for call in range(20):
            events.append(start_event(1000.0 * call, 100 * call, **arguments))
            for step in range(100 * call, 100 * call + 200):
                when = 1000.0 * call + step
                events += [checkpoint_event(when, step), {"event": "evaluation", "time_s": when, "step": step}]
                events.append(
                    {"event": "warning", "time_s": when, "text": f"{step} " + "y" * 500 + chr(65 + step % 26)}
                )
        entries = [{"step": n, "loss": n / 7, "grad_norm": n / 3} for n in range(10_000)]
        runs.append(RunFolder.read(write_run(tmp_path / str(number), events, entries)))
    text = page(runs)
    assert len(text.encode()) < 500_000


def test_a_page_needs_nothing_from_outside_and_no_value_can_end_its_script(tmp_path):
    events = [
        start_event(1.0, arguments={"run_name": "</script><script>alert(1)"}),
        end_event(2.0, 1, "failed", error="<b>"),
    ]
    text = page([RunFolder.read(write_run(tmp_path / "<i>", events))])
    assert text.count("</script>") == 3
    assert "<i>" not in text
    assert "alert(1)" in text
    for word in ('src="', "@import", "fetch(", "url("):
        assert word not in text


def test_several_runs_show_the_arguments_in_which_they_differ(tmp_path):
    runs = [
        RunFolder.read(write_run(tmp_path / f"{n}" / "out", [start_event(1.0, arguments={"seed": n, "bf16": True})]))
        for n in range(2)
    ]
    data = page_data(runs)
    assert column_of(data, "seed") == [0, 1]
    assert [run["arguments"] for run in data["runs"]] == [[["seed", 0, ""]], [["seed", 1, ""]]]
    assert data["arguments"] == [["bf16", True, ""]]
    assert [run["name"] for run in data["runs"]] == ["0/out", "1/out"]


def column_of(data, title):
    titles = [column["title"] for column in data["columns"]]
    return [run["row"][titles.index(title)] for run in data["runs"]]


def test_the_table_of_runs_has_results_and_leaves_out_what_says_nothing_new(tmp_path):
    runs = []
    for number, accuracy in enumerate((0.5, 0.75)):
        folder = tmp_path / f"run-{number}"
        arguments = {"output_dir": str(folder), "data": f"/big/disk/set-{number}", "seed": number, "data_seed": number}
        arguments |= {"metric_for_best_model": "accuracy", "eval_steps": 10}
        entries = [{"step": 10, "eval_accuracy": accuracy, "eval_runtime": 1.0}, {"step": 20, "eval_accuracy": 0.25}]
        predicted = {
            "event": "prediction",
            "time_s": 99.0,
            "step": 20,
            "metrics": {"test_f1": 0.5, "test_runtime": 2.0},
        }
        events = [start_event(1.0, arguments=arguments), end_event(3.0, 20), *([predicted] if number else [])]
        runs.append(RunFolder.read(write_run(folder, events, [*entries, {"step": 20, "loss": "NaN"}])))
    data = page_data(runs)
    assert [column["title"] for column in data["columns"]] == [
        *("best accuracy", "at step", "state", "data", "seed", "training loss", "evaluation accuracy", "prediction f1"),
        *("steps", "wall time"),
    ]
    assert data["columns"][0]["greater"] is True
    assert column_of(data, "data") == ["set-0", "set-1"]
    assert [run["row"] for run in data["runs"]] == [
        [0.5, 10, "finished", "set-0", 0, "NaN", 0.25, None, 20, 2.0],
        [0.75, 10, "finished", "set-1", 1, "NaN", 0.25, 0.5, 20, 2.0],
    ]


def test_where_one_run_does_not_know_an_argument_the_paths_of_the_others_are_short(tmp_path):
    told = [{"output_dir": str(tmp_path / "0"), "data": "/disk/a/x"}, {"data": "/disk/b/x"}, {}]
    runs = [RunFolder.read(write_run(tmp_path / str(n), [start_event(1.0, arguments=a)])) for n, a in enumerate(told)]
    data = page_data(runs)
    assert column_of(data, "data") == ["a/x", "b/x", "(not known)"]
    assert "output_dir" not in [column["title"] for column in data["columns"]]


def test_a_run_leads_with_its_results_and_says_what_ran_and_where(tmp_path):
    known = {
        "model": {"class": "Net", "source": "some/net", "parameters": 1234567, "trained": 34},
        "train_samples": 9000,
        "hardware": {"cpu": "Fast 9", "cores": 4, "devices": ["H", "H"]},
        "command": "train.py --seed 1",
        "commit": "0123456789abcdef",
        "modified": 2,
    }
    events = [start_event(1.0, **known), {"event": "evaluation", "time_s": 2.0, "step": 5, "samples": 500}]
    entries = [{"step": 5, "eval_loss": 0.5}, {"step": 9, "eval_loss": 0.75}, {"step": 9, "loss": 1.0}]
    (run,) = page_data([RunFolder.read(write_run(tmp_path, [*events, end_event(3.0, 9)], entries))])["runs"]
    assert run["results"] == [
        ["best evaluation loss", "0.5", "at step 5"],
        ["evaluation loss", "0.75", ""],
        ["training loss", "1", ""],
    ]
    assert run["objective"] == "eval_loss"
    assert run["facts"][3:] == [
        ["model", "Net"],
        ["parameters", "1,234,567"],
        ["trained", "34 parameters"],
        ["samples", "9,000 to train on, 500 to evaluate on"],
        ["GPU", "2 x H"],
        ["processor", "Fast 9, 4 cores"],
        ["commit", "0123456789ab, 2 files modified"],
        ["weights from", "some/net"],
        ["command", "train.py --seed 1"],
    ]


def test_curves_have_the_names_that_people_say(tmp_path):
    names = ("loss", "eval_loss", "eval_f1_macro", "eval_samples_per_second", "samples_per_second", "__own__", "my_own")
    assert [words_of(name) for name in names] == [
        ("training loss", ""),
        ("evaluation loss", ""),
        ("evaluation f1 macro", ""),
        ("evaluation speed", "samples/s"),
        ("speed", "samples/s"),
        ("__own__", ""),
        ("my own", ""),
    ]


def test_an_evaluation_or_a_prediction_after_the_training_is_on_the_page(tmp_path):
    folder = write_run(tmp_path / "run", [start_event(1.0), end_event(2.0, 1)], [{"step": 1, "loss": 1.0}])
    args, state = SimpleNamespace(output_dir=folder), SimpleNamespace(is_world_process_zero=True)
    file = ReportFile()
    file.on_evaluate(args, state, None)
    assert not (folder / "report.html").exists()  # the training has not ended
    file.on_train_end(args, state, None)
    with (folder / "metrics.jsonl").open("a") as metrics:
        metrics.write('{"step": 1, "eval_f1": 0.8125}\n')
    file.on_evaluate(args, state, None)
    assert '["evaluation f1","0.8125",""]' in (folder / "report.html").read_text()


def test_where_a_page_takes_long_the_last_evaluation_is_on_it_when_the_process_ends(tmp_path, monkeypatch):
    written, at_exit = [], []
    run = SimpleNamespace(sessions=[])
    monkeypatch.setattr("tr_log.report.at_end.write_report", lambda *_: written.append(1) or time.sleep(0.01) or [run])
    monkeypatch.setattr("tr_log.report.at_end.FREE_S", 0.015)
    monkeypatch.setattr("atexit.register", at_exit.append)
    file, state = ReportFile(), SimpleNamespace(is_world_process_zero=True)
    args = SimpleNamespace(output_dir=tmp_path)
    file.on_train_end(args, state, None)
    for _ in range(5):
        file.on_evaluate(args, state, None)
    assert len(written) == 3
    at_exit[0]()
    at_exit[0]()
    assert len(written) == 4


def test_the_end_of_a_run_writes_the_page_and_a_failure_is_a_warning(tmp_path, caplog):
    args = SimpleNamespace(output_dir=str(write_run(tmp_path / "run", KILLED_ONCE)))
    state = SimpleNamespace(is_world_process_zero=True)
    ReportFile().on_train_end(args, state, None)
    assert "<h1>run</h1>" in (tmp_path / "run" / "report.html").read_text()
    args.output_dir = str(tmp_path / "missing")
    ReportFile().on_train_end(args, state, None)
    assert "was not written" in caplog.text
    ReportFile().on_train_end(args, SimpleNamespace(is_world_process_zero=False), None)


def test_the_end_of_a_run_says_what_it_came_to(tmp_path, caplog):
    entries = [{"step": step, "eval_loss": loss} for step, loss in ((50, 0.25), (100, 0.5))]
    folder = write_run(tmp_path / "run", KILLED_ONCE, entries)
    (folder / "checkpoint-50").mkdir()
    with caplog.at_level("INFO", "tr_log"):
        ReportFile().on_train_end(SimpleNamespace(output_dir=folder), SimpleNamespace(is_world_process_zero=True), None)
    assert caplog.messages == [
        "training finished at step 100\n"
        "  evaluation  eval_loss 0.5  at step 100\n"
        "  best        eval_loss 0.25 at step 50\n"
        f"  checkpoints best {folder}/checkpoint-50\n"
        f"  report      {folder}/report.html\n"
        "  time        0:31: computing 45%, between two calls of train 23%, preparing and restoring 10%, "
        "lost, and done again after a restart 10%, waiting for data 6%, evaluating 3%, saving checkpoints 3%"
    ]


def test_a_run_without_events_has_its_page_and_no_ending(tmp_path, caplog):
    folder = write_run(tmp_path / "run", entries=[{"step": 1, "loss": 0.5}])
    with caplog.at_level("INFO", "tr_log"):
        ReportFile().on_train_end(SimpleNamespace(output_dir=folder), SimpleNamespace(is_world_process_zero=True), None)
    assert (caplog.messages, (folder / "report.html").is_file()) == ([], True)


def test_a_run_that_was_stopped_says_how_it_goes_on(tmp_path):
    events = [start_event(1.0), {"event": "checkpoint", "time_s": 2.0, "step": 1}, end_event(2.0, 1, status="stopped")]
    folder = write_run(tmp_path, events)
    assert "to go on" not in result_of(RunFolder.read(folder))  # from a checkpoint that is not there
    (folder / "checkpoint-1").mkdir()
    assert result_of(RunFolder.read(folder)).endswith("train(resume_from_checkpoint=True)")


def test_the_command_writes_the_page_and_says_where(tmp_path, capsys):
    folder = write_run(tmp_path / "run", KILLED_ONCE)
    assert report([str(folder), "-o", str(tmp_path / "new" / "x.html")]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'new' / 'x.html'}\n"
    assert (tmp_path / "new" / "x.html").stat().st_size > 50_000
    assert os.listdir(tmp_path / "new") == ["x.html"]
    (tmp_path / "empty").mkdir()
    assert report([str(tmp_path / "empty")]) == 1
    assert "holds no run" in capsys.readouterr().err


def test_links_to_files_lead_from_where_the_page_lies(tmp_path):
    folder = write_run(tmp_path / "a b", [start_event(0.0)], [{"step": 1, "loss": 1.0}])
    for name in ("100%#?.txt", "checkpoint-10", "checkpoint-9"):
        (folder / name).mkdir() if name.startswith("checkpoint") else (folder / name).touch()

    def addresses(place):
        return {name: address for name, address in page_data([RunFolder.read(folder)], place)["runs"][0]["files"]}

    beside = addresses(folder)
    assert list(beside) == ["100%#?.txt", "checkpoint-9/", "checkpoint-10/", "events.jsonl", "metrics.jsonl"]
    assert beside["100%#?.txt"] == "./100%25%23%3F.txt"
    assert addresses(tmp_path)["checkpoint-9/"] == folder.as_uri() + "/checkpoint-9/"
    assert "/a%20b/" in addresses(tmp_path)["metrics.jsonl"]
    assert set(addresses(None).values()) == {""}  # a browser follows no link from a server's page to a file


def test_of_very_many_files_the_first_and_the_last_are_listed(tmp_path):
    write_run(tmp_path, [start_event(0.0)], [{"step": 1, "loss": 1.0}])
    for number in range(100):
        (tmp_path / f"{number}.bin").touch()
    names = [name for name, _ in page_data([RunFolder.read(tmp_path)])["runs"][0]["files"]]
    assert names[:2] == ["0.bin", "1.bin"]
    assert names[-1] == "metrics.jsonl"
    assert names[30] == "... 42 more"


OPERATOR = {"name": "aten::mm", "calls": 12, "cpu_ms": 3.5, "device_ms": 0.0, "share": 0.25}


def test_a_recording_of_some_steps_has_a_table_and_links(tmp_path):
    event = {"event": "profile", "time_s": 3.0, "step": 7, "first": 4, "last": 7, "operators": [OPERATOR]}
    events = [start_event(1.0), {**event, "trace": "profile/steps-4-7.trace.json.gz"}]
    run = RunFolder.read(write_run(tmp_path / "a run", events))
    (found,) = page_data([run], tmp_path / "a run")["runs"][0]["profiles"]
    assert found == {
        "steps": "steps 4 to 7",
        "heads": ["operator", "share", "calls", "CPU, ms"],
        "rows": [["aten::mm", "25.0 %", "12", "3.50"]],
        "files": [["profile/steps-4-7.trace.json.gz", "./profile/steps-4-7.trace.json.gz"]],
    }


def test_times_on_a_device_are_a_column_of_their_own(tmp_path):
    operators = [{**OPERATOR, "device_ms": 2.0}, "nonsense"]
    event = {"event": "profile", "time_s": 3.0, "first": 4, "last": 4, "operators": operators}
    (found,) = page_data([RunFolder.read(write_run(tmp_path, [start_event(1.0), event]))])["runs"][0]["profiles"]
    assert found["steps"] == "step 4"
    assert found["rows"] == [["aten::mm", "25.0 %", "12", "3.50", "2.00"]]
    assert found["files"] == []


def test_whoever_asks_for_a_picture_is_told_what_to_do(killed, capsys):
    with pytest.raises(SystemExit) as ended:
        report([str(killed.path), "--png"])
    assert ended.value.code == 2
    assert "--png draws no picture any more: leave it out, open the page, and print it" in capsys.readouterr().err


def test_on_the_axis_of_time_a_resumed_run_goes_on_when_its_loop_began(killed):
    assert page_data([killed])["runs"][0]["times"] == [[0, 2.0], [50, 10.0], [50.001, 21.0], [100, 31.0]]


def test_two_pages_that_are_written_at_one_time_do_not_meet(tmp_path, monkeypatch):
    run, page, replace = write_run(tmp_path / "run", KILLED_ONCE), tmp_path / "page.html", Path.replace

    def meanwhile(beside, target):
        monkeypatch.setattr(Path, "replace", replace)
        write_report([run], page)
        return replace(beside, target)

    monkeypatch.setattr(Path, "replace", meanwhile)
    write_report([run], page)
    assert page.read_text().startswith("<!doctype html>")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["page.html", "run"]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no pipes with names here")
def test_a_page_goes_through_a_link_and_into_a_pipe_and_takes_the_place_of_neither(tmp_path):
    run = write_run(tmp_path / "run", KILLED_ONCE)
    (tmp_path / "page.html").write_text("old")
    (tmp_path / "link.html").symlink_to(tmp_path / "page.html")
    write_report([run], tmp_path / "link.html")
    assert (tmp_path / "link.html").is_symlink()
    assert (tmp_path / "page.html").read_text().startswith("<!doctype html>")
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with (tmp_path / "copy.html").open("wb") as copy, subprocess.Popen(["cat", pipe], stdout=copy) as reader:
        try:
            write_report([run], pipe)
            reader.wait(timeout=60)
        finally:
            reader.kill()
    assert (tmp_path / "copy.html").read_text().startswith("<!doctype html>")
    assert pipe.is_fifo()
