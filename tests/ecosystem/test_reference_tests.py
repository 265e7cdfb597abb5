"""Tests of transformers that pass with its classes only are found, and want a reason."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

HERE = Path(__file__).parent
FILE = """
import unittest
import transformers

class Some(unittest.TestCase):
    def test_of_both(self):
        self.assertTrue(issubclass(transformers.Trainer, object))

    def test_of_theirs(self):
        self.assertTrue(transformers.Trainer.__module__.startswith("transformers"))

    def test_of_theirs_in_a_part(self):
        for name in ("TrainingArguments", "default_data_collator"):
            with self.subTest(name):
                self.assertTrue(getattr(transformers, name).__module__.startswith("transformers"))

    @unittest.skip("no device")
    def test_of_a_device(self): ...

    def test_of_none(self):
        self.fail()
"""

sys.path.insert(0, str(HERE))
import reference_tests  # noqa: E402


@pytest.mark.skipif(not find_spec("transformers"), reason="needs transformers")
def test_a_test_that_passes_with_their_classes_only_is_listed_and_fails_the_command(tmp_path):
    trainer = tmp_path / "tests" / "trainer"
    trainer.mkdir(parents=True)
    (trainer / "test_some.py").write_text(FILE)
    command = [sys.executable, str(HERE / "reference_tests.py"), str(tmp_path)]
    command += ["--keep", str(tmp_path / "kept"), "trainer/test_some.py"]  # in any order
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 1, done.stderr[-2000:]
    assert "5 tests with transformers: {'passed': 3, 'failed': 1, 'skipped': 1}" in done.stdout
    assert "of the 3 that pass there, 1 pass with our classes, 2 do not" in done.stdout
    assert done.stdout.count("NO REASON: AssertionError") == 2


def test_a_reason_ends_the_complaint(capsys):
    name = "tests/trainer/test_some.py::Some::test_one"
    theirs = {name: {"outcome": "passed", "why": ""}}
    ours = {name: {"outcome": "failed", "why": "no"}}
    reasons = {"test_some.py": {"Some::test_one": "private: a method with an underscore"}}
    assert reference_tests.report(theirs, ours, {}) == 1
    assert reference_tests.report(theirs, ours, reasons) == 0
    assert "private: a method with an underscore" in capsys.readouterr().out


def test_a_reason_names_a_row_that_is_there():
    assert reference_tests.read_reasons() is not None
