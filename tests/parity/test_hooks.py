"""Every method of transformers' Trainer is here for subclasses to override, or refused; the page lists them."""

import inspect
from pathlib import Path

import torch
import transformers

from tr_core import Seq2SeqTrainer, Trainer, TrainingArguments
from tr_core.testing import refused_hooks

PAGE = Path(__file__).parents[2] / "packages" / "tr-core" / "docs" / "hooks.md"


def methods(kind):
    """Return the methods and properties that a class of transformers defines itself."""
    return [
        name
        for name, value in vars(kind).items()
        if not name.startswith("__") and (callable(value) or isinstance(value, property))
    ]


def what_happens(name):
    if name in refused_hooks():
        return f"refused: {refused_hooks()[name]}"
    if not hasattr(Trainer, name):
        return None
    documented = inspect.getdoc(getattr(Trainer, name)) or ""
    return f"is here: {documented.splitlines()[0]}"


def table():
    rows = [f"| `{name}` | {what_happens(name)} |" for name in sorted(methods(transformers.Trainer))]
    return "\n".join(["| method | here |", "|---|---|", *rows])


def test_each_method_of_transformers_is_here_or_refused():
    assert [name for name in methods(transformers.Trainer) if what_happens(name) is None] == []


def test_each_method_of_the_trainer_that_generates_is_here():
    assert [name for name in methods(transformers.Seq2SeqTrainer) if not hasattr(Seq2SeqTrainer, name)] == []


def test_nothing_is_refused_that_transformers_does_not_have():
    earlier = {"_nested_gather"}  # of former versions; subclasses still have it
    assert set(refused_hooks()) - earlier <= set(methods(transformers.Trainer))


def test_the_page_lists_them():
    assert table() in PAGE.read_text(encoding="utf-8"), "run `nox -s regen`"


def test_what_transformers_assigns_may_be_assigned_or_is_refused_in_words(tmp_path):
    arguments = {"output_dir": str(tmp_path), "use_cpu": True, "report_to": "none"}
    theirs = transformers.Trainer(model=torch.nn.Linear(1, 1), args=transformers.TrainingArguments(**arguments))
    ours = Trainer(model=torch.nn.Linear(1, 1), args=TrainingArguments(**arguments), train_dataset=[{}])
    problems = []
    for owner, names in ((ours, vars(theirs)), (ours.args, vars(theirs.args))):
        for name in names:
            if hasattr(owner, name):
                try:
                    setattr(owner, name, getattr(owner, name))
                except AttributeError as error:  # what is refused says so in words
                    problems += [name] if "no setter" in str(error) else []
    assert problems == []
