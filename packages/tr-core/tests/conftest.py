"""Build Trainers of small models for every test of this package."""

import gc
import logging
import multiprocessing
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

sys.path.insert(0, str(Path(__file__).parent))

from support.callbacks import on
from support.data import samples
from support.models import Classifier
from support.reads import read_counter  # noqa: F401  a fixture
from support.runs import saving_trainer

from tr_core import Trainer, TrainingArguments, plugins


def pytest_collection_modifyitems(items):
    for item in items:
        if item.get_closest_marker("cuda") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def one_thread_and_no_worker_left():
    """Ends the workers of loaders that an error keeps alive: where they are garbage, torch waits 5 s for each."""
    torch.set_num_threads(1)
    yield
    if multiprocessing.active_children():
        for found in gc.get_objects():
            if type(found) is _MultiProcessingDataLoaderIter:
                found._shutdown_workers()


@pytest.fixture
def no_sync():
    """Return a callback that makes waiting for a CUDA device an error, from the third step to the last but one."""

    def check(state, **others):
        torch.cuda.set_sync_debug_mode("error" if 2 <= state.global_step < state.max_steps - 1 else "default")

    yield on("on_step_end", check)
    torch.cuda.set_sync_debug_mode("default")


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Classifier()


@pytest.fixture
def make_args(tmp_path):
    def build(**changes):
        options = {
            "output_dir": str(tmp_path / "out"),
            "per_device_train_batch_size": 4,
            "num_train_epochs": 1,
            "logging_steps": 1,
            "save_strategy": "no",
            "disable_tqdm": True,
            "log_level": "error",
            "use_cpu": True,
        }
        return TrainingArguments(**{**options, **changes})

    return build


@pytest.fixture
def make_trainer(make_args, model):
    def build(number=20, trainer_class=Trainer, **changes):
        parts = {
            name: changes.pop(name)
            for name in list(changes)
            if name in Trainer.__init__.__annotations__ and name != "strategy"
        }
        parts.setdefault("model", model) if "model_init" not in parts else None
        parts.setdefault("train_dataset", samples(number))
        return trainer_class(args=make_args(**changes), **parts)

    return build


@pytest.fixture
def make_trained(make_trainer):
    """Build a Trainer as `make_trainer` does, and train it."""

    def build(*arguments, **changes):
        trainer = make_trainer(*arguments, **changes)
        trainer.train()
        return trainer

    return build


@pytest.fixture
def saving(make_trainer, tmp_path):
    """Build a Trainer of ten steps that keeps its checkpoints in memory."""
    return partial(saving_trainer, make_trainer, tmp_path)


@pytest.fixture
def installed(monkeypatch):
    """Set which entry points installed packages offer: those that are passed, or these beside the real ones."""
    real = plugins._entries

    def replace(*entries, beside=False):
        def offered(group):
            return (*(real(group) if beside else ()), *(entry for entry in entries if entry.group == group))

        monkeypatch.setattr(plugins, "_entries", offered)

    return replace


@pytest.fixture
def heard(monkeypatch):
    """Return a function that keeps the texts that a logger is given from then on, also those below its level."""

    def listen(*levels, name="tr_core.trainer"):
        lines = []
        for level in levels or ("debug", "info", "warning", "error"):
            keep = lambda text, *args: lines.append(text % args if args else text)  # noqa: E731
            monkeypatch.setattr(logging.getLogger(name), level, keep)
        return lines

    return listen
