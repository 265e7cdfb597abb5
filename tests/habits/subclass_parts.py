"""Run a subclass once on transformers' Trainer and once on ours, and compare numbers, logs, files and calls."""

import functools
import inspect
import math
import types
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from habit_parts import Net, rows
from torch import nn
from transformers.modeling_outputs import SequenceClassifierOutput

import tr_core

# An evaluation's mean loss is a sum in float32 there and in float64 here.
ROUNDING = 3e-7
_TIMES = ("_runtime", "_per_second", "_preparation_time")


class Classes(nn.Module):
    """Three classes and a cross-entropy, with outputs as models of transformers have them."""

    def __init__(self, seed=0):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.embeddings = nn.Linear(4, 5)
            self.head = nn.Linear(5, 3)

    def forward(self, x, labels=None):
        logits = self.head(torch.tanh(self.embeddings(x)))
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return SequenceClassifierOutput(loss=loss, logits=logits)


def class_rows(number=8, seed=0):
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(number, 4, generator=generator)
    return [{"x": row, "labels": torch.tensor(index * index % 3)} for index, row in enumerate(features)]


@dataclass
class Side:
    """What one of the two Trainers made of a subclass.

    Attributes:
        name: `theirs` or `ours`.
        trainer: the Trainer.
        calls: each call of a method of the subclass: its name, and its arguments by name.
        result: what the habit returned.
        folder: where it wrote.
    """

    name: str
    folder: Path
    trainer: Any = None
    calls: list = field(default_factory=list)
    result: Any = None

    @property
    def history(self):
        """The log without times, and without the operations that only one side counts."""
        return [_plain_entry(entry) for entry in self.trainer.state.log_history]

    @property
    def weights(self):
        return {name: value.clone() for name, value in self.trainer.model.state_dict().items()}

    def called(self, name):
        return [arguments for method, arguments in self.calls if method == name]

    def files(self, below="."):
        root = self.folder / below
        return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


def run_on(name, kind, make_subclass, folder, *, use, build, parts, changes):
    """Build a subclass of `kind`, use it, and return what came of it."""
    side = Side(name, folder)
    module = transformers if name == "theirs" else tr_core
    parts = {key: value() if callable(value) and key in MADE else value for key, value in parts.items()}
    own = record_calls(make_subclass, kind, side)
    arguments = {**ARGUMENTS, "output_dir": str(folder), **changes}
    with warnings.catch_warnings():
        if name == "theirs":
            warnings.simplefilter("ignore")
        parts["args"] = module.TrainingArguments(**arguments)
        side.trainer = build(own, parts)
        side.trainer.remove_callback(transformers.PrinterCallback)
        side.result = describe(use(side.trainer), side)
    return side


# Parts that are made for each side: neither may see what the other did to them.
MADE = ("model", "train_dataset", "eval_dataset", "callbacks")
ARGUMENTS = {
    "per_device_train_batch_size": 2,
    "per_device_eval_batch_size": 2,
    "num_train_epochs": 1,
    "learning_rate": 0.1,
    "optim": "sgd",
    "lr_scheduler_type": "constant",
    "max_grad_norm": 0,
    "logging_steps": 1,
    "save_strategy": "no",
    "disable_tqdm": True,
    "report_to": "none",
    "log_level": "error",
    "use_cpu": True,
}


def train(trainer):
    return trainer.train().training_loss


def construct(kind, parts):
    return kind(**parts)


def run_both(tmp_path, make_subclass, *, use=train, build=construct, classes=False, parts=None, **changes):
    """Run a subclass on both sides.

    Args:
        tmp_path: a folder.
        make_subclass: a class that is put before the Trainer's; or `(Trainer class)` → the subclass; or a pair of such
            functions, of which the second is for ours.
        use: what is done with the Trainer; it trains by default.
        build: `(subclass, constructor's arguments)` → the Trainer.
        classes: a model of classes, in place of one of numbers.
        parts: arguments of the constructor; models, data and callbacks as functions that make them.
        changes: training arguments.
    """
    model, data = (Classes, class_rows) if classes else (Net, rows)
    makers = make_subclass if isinstance(make_subclass, tuple) else (make_subclass, make_subclass)
    how = {"use": use, "build": build, "changes": changes}
    how["parts"] = {"model": model, "train_dataset": data, **(parts or {})}
    theirs = run_on("theirs", transformers.Trainer, makers[0], tmp_path / "theirs", **how)
    return theirs, run_on("ours", tr_core.Trainer, makers[1], tmp_path / "ours", **how)


def assert_equal(theirs, ours, but=()):
    """Compare losses, logs, weights, results and calls.

    Args:
        theirs: one side.
        ours: the other.
        but: names of arguments of calls that are not compared.
    """
    _assert_entries(theirs.history, ours.history)
    expected = theirs.weights
    assert ours.weights.keys() == expected.keys()
    for name, value in ours.weights.items():
        assert torch.equal(value, expected[name]), f"{name} differs: {value} {expected[name]}"
    assert same(theirs.result, ours.result), f"{theirs.result} {ours.result}"
    assert [name for name, _ in ours.calls] == [name for name, _ in theirs.calls]
    for (name, first), (_, second) in zip(theirs.calls, ours.calls, strict=True):
        first, second = ({key: value for key, value in one.items() if key not in but} for one in (first, second))
        assert same(first, second), f"{name} was called with {first} there and {second} here"


def run_alike(tmp_path, make_subclass, *, but=(), **how):
    """Run a subclass on both sides and compare everything; return both."""
    theirs, ours = run_both(tmp_path, make_subclass, **how)
    assert_equal(theirs, ours, but=but)
    return theirs, ours


def _assert_entries(theirs, ours):
    assert len(ours) == len(theirs), f"{theirs} {ours}"
    for number, (first, second) in enumerate(zip(theirs, ours, strict=True)):
        assert same(first, second), f"entry {number}: {first} there, {second} here"


def same(first, second):
    """Whether two described values are the same; metrics of an evaluation may differ by its rounding."""
    if isinstance(first, dict) and isinstance(second, dict):
        return first.keys() == second.keys() and all(_same_value(key, first[key], second[key]) for key in first)
    if isinstance(first, list | tuple) and isinstance(second, list | tuple):
        return len(first) == len(second) and all(same(one, two) for one, two in zip(first, second, strict=True))
    if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
        return torch.equal(first, second)
    return first == second or (first != first and second != second)


def _same_value(name, first, second):
    if isinstance(first, float) and isinstance(second, float) and str(name).startswith(("eval_", "test_")):
        return math.isclose(first, second, rel_tol=ROUNDING)
    return same(first, second)


def _plain_entry(entry):
    return {key: value for key, value in entry.items() if not key.endswith(_TIMES) and key != "total_flos"}


def record_calls(make_subclass, base, side):
    """Make a subclass of `base` and record each call of the methods that it and its mixins define."""
    if isinstance(make_subclass, type):
        kind = type(make_subclass.__name__, (make_subclass, base), {})
        _record(make_subclass, kind, base, side)
        return kind
    kind = make_subclass(base)
    for cls in kind.__mro__[: kind.__mro__.index(base)]:
        _record(cls, cls, base, side)
    return kind


def _record(defines, into, base, side):
    for name, value in list(vars(defines).items()):
        if isinstance(value, types.FunctionType) and not name.startswith("__") and hasattr(base, name):
            setattr(into, name, _recording(name, value, side))


def _recording(name, function, side):
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(self, *args, **kwargs):
        bound = signature.bind(self, *args, **kwargs)
        bound.apply_defaults()
        given = dict(list(bound.arguments.items())[1:])
        side.calls.append((name, {key: describe(value, side) for key, value in given.items()}))
        return function(self, *args, **kwargs)

    return call


def describe(value, side):
    """Describe an argument by what both sides have of it."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, Mapping):
        return {key: describe(item, side) for key, item in _plain_entry(value).items()}
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return describe(value._asdict(), side)
    if isinstance(value, list | tuple):
        return [describe(item, side) for item in value]
    if isinstance(value, str | Path):
        return str(value).replace(str(side.folder), "FOLDER")
    if value is None or isinstance(value, int | float):
        return value
    return "model" if isinstance(value, nn.Module) else "object"
