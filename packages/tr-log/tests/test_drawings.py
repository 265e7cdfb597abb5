"""What is drawn on the page of a run: which values it takes, and how much of them it keeps."""

import json
from types import SimpleNamespace

import pytest

from tr_log import ConfusionMatrix, EventsFile, Table
from tr_log.drawings import MOST_CHARACTERS, MOST_CLASSES, MOST_ROWS
from tr_log.report.page import MOST_DRAWN, page, page_data
from tr_log.report.run_folder import RunFolder, find_runs
from tr_log.testing import end_event, start_event, time_event, write_run


def test_a_matrix_counts_pairs_of_true_and_predicted_classes():
    matrix = ConfusionMatrix.of([0, 0, 1, 2], [0, 1, 1, 0], names=["a", "b", "c"])
    assert matrix.content() == {"kind": "matrix", "names": ["a", "b", "c"], "counts": [[1, 1, 0], [0, 1, 0], [1, 0, 0]]}
    assert ConfusionMatrix(SimpleNamespace(tolist=lambda: [[1, 0], [2, 3]])).content()["names"] == ["0", "1"]


def test_of_many_classes_the_pairs_that_are_confused_most_are_a_table():
    size = MOST_CLASSES + 1
    counts = [[5 * (true == predicted) + (true == 0) * predicted for predicted in range(size)] for true in range(size)]
    table = ConfusionMatrix(counts).content()
    assert (table["columns"], table["of"]) == (["true class", "predicted", "times"], MOST_CLASSES)
    assert table["rows"][0] == ["0", str(MOST_CLASSES), str(MOST_CLASSES)]


def test_a_table_keeps_few_rows_and_says_how_many_there_are():
    table = Table(["text", "score"], [("word", 0.123456)] * 500).content()
    assert (len(table["rows"]), table["of"], table["rows"][0]) == (MOST_ROWS, 500, ["word", "0.1235"])
    long = Table(["a", "b", "c"], [("x" * 5000,) * 3] * 50).content()
    assert sum(len(cell) for row in long["rows"] for cell in row) <= MOST_CHARACTERS


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: ConfusionMatrix([[1, 2], [3]]),
            r"2 rows, rows of 1, 2 columns, and 2 names; it needs a row, a column",
        ),
        (lambda: ConfusionMatrix([[1]], ["a", "b"]), "1 rows, .* and 2 names"),
        (
            lambda: ConfusionMatrix.of([-100, 1], [0, 1]),
            "has the class -100; classes are numbers from 0 to 1: l",
        ),
        (lambda: Table(["a", "b"], [(1,)]), r"has 2 columns \(a, b\), but a row has 1 cells: \[1\]; give each row"),
    ],
)
def test_what_does_not_fit_together_is_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def drawn(folder, number):
    args = SimpleNamespace(output_dir=str(folder))
    state = SimpleNamespace(global_step=0, max_steps=number, is_world_process_zero=True)
    file = EventsFile()
    file.on_draw(args, state, None, drawings={"eval_seen": Table(["n"], [(0,)])})  # no run is known yet
    file.on_train_begin(args, state, None)
    for step in range(1, number + 1):
        state.global_step = step
        file.on_draw(args, state, None, drawings={"eval_seen": Table(["n"], [(step,)])})
    file.on_train_end(args, state, None)
    file.on_draw(args, state, None, drawings={"test_seen": Table(["n"], [(step,)])})
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    return [event["step"] for event in events if event["event"] == "drawing"]


def test_of_very_many_drawings_the_file_has_fewer_and_fewer_and_the_last_one(tmp_path):
    steps = drawn(tmp_path, 2000)
    assert steps[:49] == [*range(1, 50)]
    assert len(steps) < 300
    assert steps[-2:] == [2000, 2000]  # and what came after the end


def test_a_later_training_of_one_object_begins_without_drawings_of_the_one_before(tmp_path):
    args = SimpleNamespace(output_dir=str(tmp_path))
    state = SimpleNamespace(global_step=0, max_steps=60, is_world_process_zero=True)
    file = EventsFile()
    file.on_train_begin(args, state, None)
    for _ in range(51):
        file.on_draw(args, state, None, drawings={"eval_seen": Table(["n"], [])})
    for _ in range(2):
        file.on_train_end(args, state, None)
        file.on_train_begin(args, state, None)
    file.on_train_end(args, state, None)
    assert "drawing" not in (tmp_path / "events.jsonl").read_text()


def drawing_event(step, name="eval_seen", text="x"):
    content = Table(["a"], [(text,)]).content()
    return {"event": "drawing", "time_s": 1.0, "step": step, "name": name, **content}


def test_the_page_has_the_newest_of_each_name_first_and_none_of_steps_that_were_made_again(tmp_path):
    events = [
        start_event(0.0),
        *(drawing_event(step) for step in (10, 20, 30)),
        start_event(2.0, 20),
        drawing_event(25),
    ]
    folder = write_run(tmp_path, [*events, end_event(3.0, 30), drawing_event(30, "test_seen")])
    (run,) = page_data([RunFolder.read(folder)])["runs"]
    steps = {each["title"]: [one["step"] for one in each["drawn"]] for each in run["drawings"]}
    assert steps == {"evaluation seen": [25, 20, 10], "prediction seen": [30]}


def test_a_page_has_room_for_so_many_drawings_and_no_more(tmp_path):
    events = [start_event(0.0), *(drawing_event(step, f"eval_{step % 7}") for step in range(50))]
    events = [event | {"rows": [["x" * 900] * 20]} if "rows" in event else event for event in events]
    (run,) = page_data([RunFolder.read(write_run(tmp_path, events))])["runs"]
    assert [len(each["drawn"]) for each in run["drawings"]].count(0) == 4
    assert len(json.dumps(run["drawings"])) < MOST_DRAWN


def test_a_page_of_35_runs_with_drawings_and_load_is_at_most_half_a_megabyte(tmp_path):
    load = {"cpu": 0.5123, "cpu_of_process": 0.2, "ram_bytes": 3e9}
    for number in range(35):
        events = [start_event(float(number))]
        for step in range(1, 400):
            events.append(time_event(float(step), step, compute=1.0) | {"load": load})
            events += [drawing_event(step) | {"rows": [["x" * 900] * 20]}] if step % 40 == 0 else []
        entries = [{"step": step, **{f"eval_{n}": step / (n + 7) for n in range(14)}} for step in range(1, 400)]
        write_run(tmp_path / str(number), events, entries)
    assert len(page(find_runs([tmp_path])).encode()) < 500_000
