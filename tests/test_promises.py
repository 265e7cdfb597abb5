"""Hold what the READMEs promise to `promises.toml`, that to the tests that exist, and `promises.md` to both."""

import importlib
import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).resolve().parent.parent / "tools"


@pytest.fixture(scope="module")
def tool():
    """The tool; its folder is searched only while it is imported, for it holds a module named as that of packages."""
    sys.path.insert(0, str(TOOLS))
    try:
        return importlib.import_module("promises")
    finally:
        sys.path.remove(str(TOOLS))


def test_every_promise_of_a_readme_rests_on_tests_that_exist(tool):
    wrong = tool.faults(tool.entries(), tool.texts())
    assert not wrong, "\n".join(wrong)


def test_the_page_is_what_the_list_says(tool):
    listed, written = tool.entries(), tool.texts()
    if tool.faults(listed, written):
        pytest.skip("the list comes first")
    assert tool.page(listed, written) == tool.PAGE.read_text("utf-8"), "run `nox -s promises`"


README = """\
# Title

It adds. `three()` gives [3](docs/three.md), and
`a.b` too (`old`, `older`, ...) still
works. **Always.** Or so:

```python
three()  # not a sentence. Nor this.
```

    >>> three()

- Ends on time: early, late. bfloat16 too.
  And on the next line.
1. First.

| call | does |
|---|---|
| `three()` | gives 3. Always. |

| file | holds |
|---|---|
| `three.py` | it |
"""
STATEMENTS = [
    "It adds.",
    "`three()` gives 3, and `a.b` too (`old`, `older`, ...) still works.",
    "**Always.**",
    "Or so:",
    "Ends on time: early, late.",
    "bfloat16 too.",
    "And on the next line.",
    "First.",
    "`three()` | gives 3. Always.",
]


def test_a_readme_is_split_into_sentences_and_rows_without_code_and_files(tool):
    assert tool.statements(README) == STATEMENTS


def faults(tool, entries, statements):
    """Say what is wrong with the list of one README, without how to put it right."""
    return [line for line in tool.faults({"tr-args": entries}, {"tr-args": statements}) if line][:-1]


def test_a_sentence_without_an_entry_is_printed_ready_to_paste(tool):
    found = faults(tool, {"It adds.": "description"}, ["It adds.", 'It says "no".'])
    assert found == [
        "not in the list yet; paste below [tr-args], and set what it rests on:",
        '"It says \\"no\\"." = "description"  # or [tests]',
    ]
    assert "If a promise has no test: write one, or promise less" in tool.faults({}, {"root": ["It adds."]})[-1]


def test_a_changed_sentence_comes_with_what_the_old_one_rested_on(tool):
    shown = ["tests/test_promises.py::test_a_changed_sentence_comes_with_what_the_old_one_rested_on"]
    found = faults(tool, {"It adds two numbers.": shown}, ["It adds three numbers."])
    assert found == [
        "not in the list yet; paste below [tr-args], and set what it rests on:",
        "# was: It adds two numbers.",
        f'"It adds three numbers." = ["{shown[0]}"]  # whether they still show it',
        "no longer in packages/tr-args/README.md; remove below [tr-args]:",
        '"It adds two numbers." = ...',
    ]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            ["core/test_training.py::test_of_nothing"],
            "packages/tr-core/tests/test_training.py has no test test_of_nothing",
        ),
        (["core/test_nothing.py::test_x"], "packages/tr-core/tests/test_nothing.py does not exist"),
        (["core/conftest.py::make_trainer"], "has no test make_trainer"),
        (["elsewhere/test_x.py::test_y"], "the folder is one of args, log, core,"),
        (["tests/test_promises.py"], "needs the form folder/file.py::test_name or campaign::name"),
        (["crash::lightning"], "tests/crash/run.py has damage, disk,"),
        (["robustness::lightning"], "no such script"),
        ([], "needs a list of tests"),
        ("none", "needs a list of tests"),
        ({"without_test": ""}, "needs a list of tests"),
        ({"tests": "crash::power", "without_test": "why"}, "needs a list of tests"),
        ({"reason": "why"}, "needs a list of tests"),
    ],
)
def test_what_shows_nothing_is_refused(tool, value, message):
    [found] = faults(tool, {"It adds.": value}, ["It adds."])
    assert message in found


def test_tests_campaigns_and_reasons_are_taken(tool):
    shown = ["crash::kill -9", "attack::files", "fuzz::plain", "robustness::kills", "examples::translation"]
    named = ["tests/test_promises.py::test_tests_campaigns_and_reasons_are_taken", *shown]
    for value in (named, {"without_test": "needs a Mac"}, {"tests": named, "without_test": "needs a Mac"}):
        assert tool.faults({"tr-args": {"It adds.": value}}, {"tr-args": ["It adds."]}) == []


def test_promises_without_a_test_stand_first_on_the_page_and_descriptions_do_not(tool):
    texts = ["It is small.", "It adds.", "It runs | on | a Mac."]
    entries = dict(zip(texts, ("description", ["crash::power"], {"without_test": "needs a Mac"}), strict=True))
    page = tool.page({"tr-args": entries}, {"tr-args": texts})
    assert "| packages/tr-args/README.md | 2 | 1 | 1 | 3 |\n| all | 2 | 1 | 1 | 3 |\n" in page
    rows = page.split("| promise | rests on |\n| --- | --- |\n")[1]
    assert rows == "| It runs \\| on \\| a Mac. | **needs a Mac** |\n| It adds. | `crash::power` |\n"
