"""A pytest plugin: run tests written for the Trainer of transformers, on it or on ours, and write down how each ended.

`OURS=1` puts our classes in the place of theirs before a test module is imported: those of `tr_all.drop_in`, and each
other public name of ours that the modules of transformers about training have too. `OUTCOMES` names the file.
"""

import ast
import contextlib
import importlib
import json
import os
import signal
from pathlib import Path

import pytest

SECONDS_PER_TEST = 120
# Where a name counts as part of the interface for training.
MODULES = ("trainer_utils", "trainer_pt_utils", "training_args", "hf_argparser", "optimization", "data.data_collator")
OURS = ("tr_args", "tr_log", "tr_core", "tr_optim")
LEFT = ("Adafactor",)  # transformers' AdafactorSchedule reads its internals, and drop_in leaves both as they are
RANK = {"skipped": 0, "passed": 1, "failed": 2}

outcomes = {}


def pytest_configure(config):
    """Put our classes in their place before anything of the tests is imported."""
    # The package is another module object once these are imported: set nothing on it earlier.
    importlib.import_module("transformers.processing_utils")
    importlib.import_module("transformers.trainer")
    replace_removed_names(config)
    if os.environ.get("OURS") != "1":
        return
    stack = contextlib.ExitStack()
    from tr_all.drop_in import drop_in

    stack.enter_context(drop_in())
    replace_shared_names()
    config.add_cleanup(stack.close)


def replace_removed_names(config):
    """Give a name to what a test file imports and the installed version has no more: its other tests still count."""
    package = importlib.import_module("transformers")
    for file in config.args:
        for node in ast.walk(ast.parse((config.rootpath / file).read_text())):
            if isinstance(node, ast.ImportFrom) and node.module == "transformers":
                for name in [alias.name for alias in node.names if not hasattr(package, alias.name)]:
                    setattr(package, name, mask_whole_words if name == "DataCollatorForWholeWordMask" else None)


def mask_whole_words(*arguments, **options):
    """Return what the former DataCollatorForWholeWordMask was: an option of the class that is in place."""
    collator = importlib.import_module("transformers").DataCollatorForLanguageModeling
    return collator(*arguments, mlm=True, whole_word_mask=True, **options)


def replace_shared_names():
    """Replace what the modules about training and ours both have: collators, results, enums, schedules."""
    package = importlib.import_module("transformers")
    for module_name in MODULES:
        module = importlib.import_module(f"transformers.{module_name}")
        for name, theirs in list(vars(module).items()):
            own = name not in LEFT and getattr(theirs, "__module__", None) == module.__name__
            if own and (ours := public(name)) is not None:
                setattr(module, name, ours)
                if hasattr(package, name):
                    setattr(package, name, ours)


def public(name):
    """Return our object of this name, if one is public."""
    for package in map(importlib.import_module, OURS):
        if name in package.__all__:
            return getattr(package, name)
    return None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """End a test that hangs."""

    def out_of_time(number, frame):
        raise TimeoutError(f"the test took more than {SECONDS_PER_TEST} s")

    before = signal.signal(signal.SIGALRM, out_of_time)
    signal.alarm(SECONDS_PER_TEST)
    try:
        return (yield)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def pytest_collectreport(report):
    """A file that cannot be imported has failed as a whole."""
    if report.failed:
        write(report.nodeid, "failed", report)


def pytest_runtest_logreport(report):
    """Note the worst of a test's parts: its set-up, itself, its subtests, its end."""
    if report.when == "call" or report.outcome != "passed":
        write(report.nodeid, report.outcome, report)


def write(name, outcome, report):
    known = outcomes.get(name)
    if known is not None and RANK[known] >= RANK[outcome]:
        return
    outcomes[name] = outcome
    why = "" if outcome == "passed" else reason(report)
    with Path(os.environ["OUTCOMES"]).open("a") as lines:
        lines.write(json.dumps({"test": name, "outcome": outcome, "why": why}) + "\n")


def reason(report):
    """Return the line of an error, or why a test was skipped."""
    if isinstance(report.longrepr, tuple):
        return str(report.longrepr[2])
    crash = getattr(report.longrepr, "reprcrash", None)
    return (crash.message if crash is not None else str(report.longrepr)).strip()
