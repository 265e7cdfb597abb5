"""Reading texts and labels, and what is said of files that cannot be read."""

import pytest
from input_error import InputError
from labelled_text import Columns, Sample, label_ids, label_names, read_samples


@pytest.fixture
def write(tmp_path):
    def write(name, content):
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write


def test_a_csv_file_is_read_with_quotes_and_line_breaks_in_values(write):
    path = write("a.csv", 'label,text\ngood,"one, two\nthree"\nbad,four\n')
    assert read_samples(path, Columns()) == [Sample("one, two\nthree", None, "good"), Sample("four", None, "bad")]


def test_a_tsv_file_with_other_columns_and_pairs_is_read(write):
    path = write("a.tsv", "id\tq1\tq2\tsame\n7\tHow?\tWhy?\t1\n")
    samples = read_samples(path, Columns(text="q1", pair="q2", label="same"))
    assert samples == [Sample("How?", "Why?", "1")]


@pytest.mark.parametrize("ending", ["jsonl", "json", "JSONL"])
def test_json_lines_are_read_and_their_labels_become_text(write, ending):
    path = write(f"a.{ending}", '{"text": "x", "label": 3}\n\n{"text": "ü", "label": true}\n')
    assert read_samples(path, Columns()) == [Sample("x", None, "3"), Sample("ü", None, "True")]


def test_a_byte_order_mark_is_no_part_of_the_first_column(write):
    assert read_samples(write("a.csv", "\ufefftext,label\nx,y\n"), Columns())[0].text == "x"


def test_texts_longer_than_the_csv_modules_limit_are_read(write):
    long = "x" * 200_000
    assert read_samples(write("a.csv", f"text,label\n{long},y\n"), Columns())[0].text == long


def test_test_data_may_have_no_labels(write):
    path = write("a.csv", "text\nx\n")
    assert read_samples(path, Columns(), labels_required=False) == [Sample("x")]


BROKEN = {
    "an empty file": ("a.csv", "", "holds no sample; it needs at least one line of data"),
    "a header alone": ("a.csv", "text,label\n", "holds no sample"),
    "an empty JSON file": ("a.jsonl", "\n", "holds no sample"),
    "another kind of file": ("a.parquet", "x", r"cannot read files that end in '.parquet'; give one that ends in .csv"),
    "a missing text column": (
        "a.csv",
        "body,label\nx,y\n",
        "line 2: there is no column 'text'; there are 'body', 'label'",
    ),
    "a missing label column": ("a.csv", "text,class\nx,y\n", "name the right one with --label_column"),
    "a label without a value": ("a.csv", "text,label\nx,y\nz,\n", "line 3: column 'label' has no value"),
    "a line that is too short": ("a.csv", "text,label\nx\n", "line 2: column 'label' has no value"),
    "a line that is too long": ("a.csv", "text,label\nx,y,z\n", "line 2: has 3 values under 2 column names"),
    "null in JSON": ("a.jsonl", '{"text": null, "label": "y"}\n', "line 1: column 'text' has no value"),
    "broken JSON": ("a.jsonl", '{"text": "x", "label": "y"}\n{"text"\n', "line 2: is not JSON"),
    "a JSON list": ("a.json", '[{"text": "x"}]\n', "line 1: holds a list; every line must be one JSON object"),
    "another encoding": ("a.csv", "text,label\nö,y\n".encode("latin-1"), "cannot be read as UTF-8 text"),
    "binary rubbish": ("a.csv", b"text,label\n\xff\xfe\x00", "cannot be read as UTF-8 text"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_file_that_cannot_be_used_is_refused(write, case):
    name, content, message = BROKEN[case]
    path = write(name, content)
    with pytest.raises(InputError, match=message) as error:
        read_samples(path, Columns())
    assert str(path) in str(error.value)


def test_a_missing_file_is_refused_with_its_neighbours(write):
    path = write("train.csv", "x").with_name("tarin.csv")
    with pytest.raises(InputError, match=r"tarin.csv: there is no such file; .* holds 'train.csv'"):
        read_samples(path, Columns())


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(InputError, match=r"there is no such file, and no folder .*nowhere"):
        read_samples(tmp_path / "nowhere/train.csv", Columns())


def test_a_missing_column_of_pairs_is_refused_with_its_flag(write):
    with pytest.raises(InputError, match=r"no column 'second'.*--text_pair_column"):
        read_samples(write("a.csv", "text,label\nx,y\n"), Columns(pair="second"))


@pytest.mark.parametrize(
    ("labels", "sorted_labels"), [(["10", "9", "9"], ["9", "10"]), (["10", "9", "x"], ["10", "9", "x"])]
)
def test_label_names_are_sorted_as_numbers_if_all_are_numbers(labels, sorted_labels):
    assert label_names([Sample("", None, label) for label in labels]) == sorted_labels


def test_labels_become_their_places_among_the_names():
    assert label_ids([Sample("", None, "b"), Sample("", None, "a")], ["a", "b"], "training data") == [1, 0]


def test_a_label_that_the_model_does_not_know_is_refused():
    samples = [Sample("", None, label) for label in ("a", "sport", "sport")]
    message = "validation data: 2 of 3 samples have labels that the model does not know: 'sport'; it knows 'a', 'b'"
    with pytest.raises(InputError, match=message):
        label_ids(samples, ["a", "b"], "validation data")
