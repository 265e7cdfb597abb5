import csv

import pytest

from tr_log import CsvFile


def rows(folder):
    with (folder / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture
def whole(tmp_path, make_loop):
    make_loop([CsvFile()], tmp_path / "whole").train()
    return (tmp_path / "whole" / "metrics.csv").read_text()


def test_there_is_a_column_for_every_name_and_a_row_for_every_log(tmp_path, make_loop):
    loop = make_loop([CsvFile()], tmp_path, max_steps=2).train()
    table = rows(tmp_path)
    assert list(table[0])[:5] == ["step", "loss", "grad_norm", "learning_rate", "epoch"]
    assert len(table) == len(loop.state.log_history)
    for row, entry in zip(table, loop.state.log_history, strict=True):
        assert {name: text for name, text in row.items() if text} == {name: str(entry[name]) for name in entry}


@pytest.mark.parametrize("saved", [1, 2, 3])
def test_a_resumed_run_leaves_the_file_of_one_that_never_stopped(tmp_path, make_loop, whole, saved):
    checkpoint = make_loop([], tmp_path).train(stop_at=saved).checkpoint()
    make_loop([CsvFile()], tmp_path).train(stop_at=3)
    make_loop([CsvFile()], tmp_path).train(resume=checkpoint)
    assert (tmp_path / "metrics.csv").read_text() == whole


def test_a_new_column_that_could_not_be_written_comes_with_the_next_row(tmp_path, make_loop):
    blocked = tmp_path / "blocked"
    blocked.write_text("a file where the folder should be")
    loop = make_loop([CsvFile()], blocked)
    loop.log({"loss": 0.5})
    loop.log({"loss": 0.25, "epoch": 1.0})
    blocked.unlink()
    loop.log({"loss": 0.125})
    assert (blocked / "metrics.csv").read_text() == "step,loss,epoch\n0,0.5,\n0,0.25,1.0\n0,0.125,\n"


def test_text_with_separators_and_line_breaks_stays_one_cell_on_one_line(tmp_path, make_loop):
    loop = make_loop([CsvFile()], tmp_path)
    loop.log({"note": 'one, "two"\nthree'})
    assert rows(tmp_path) == [{"step": "0", "note": 'one, "two" three'}]
    assert len((tmp_path / "metrics.csv").read_text().splitlines()) == 2


def test_a_name_with_a_line_break_has_one_column_after_a_resume_too(tmp_path, make_loop):
    first = make_loop([CsvFile()], tmp_path)
    first.train(stop_at=1)
    first.log({"a\nb": 1})
    checkpoint = first.checkpoint()
    second = make_loop([CsvFile()], tmp_path)
    second.train(resume=checkpoint, stop_at=1)
    second.log({"a\nb": 2})
    assert [row["a b"] for row in rows(tmp_path)] == ["", "1", "2"]


def test_a_cell_of_more_than_the_csv_module_takes_ends_no_resumed_run(tmp_path, make_loop, caplog):
    checkpoint = make_loop([CsvFile()], tmp_path).train(stop_at=2).checkpoint()
    with (tmp_path / "metrics.csv").open("a") as file:
        file.write("2," + "x" * 200_000 + "\n")
        file.write("9" * 5000 + ",1\n")
    make_loop([CsvFile()], tmp_path).train(resume=checkpoint, stop_at=3)
    assert "1 of" in caplog.text
    assert "rows are not readable and are dropped" in caplog.text
    assert {row["step"] for row in rows(tmp_path)} == {"1", "2", "3"}
