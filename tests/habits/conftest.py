"""Build Trainers of a small model: plain gradient descent, batches of two in the data's own order, all steps logged."""

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from habit_parts import RATE, Net, rows

from tr_core import Trainer, TrainingArguments

# Read when transformers is imported: nothing is looked up on the network, and its progress is not printed.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"


@pytest.fixture
def make_args(tmp_path):
    def build(args_class=TrainingArguments, **changes):
        options = {
            "output_dir": str(tmp_path / "out"),
            "per_device_train_batch_size": 2,
            "per_device_eval_batch_size": 2,
            "max_steps": 4,
            "learning_rate": RATE,
            "optim": "sgd",
            "lr_scheduler_type": "constant",
            "max_grad_norm": 0,
            "train_sampling_strategy": "sequential",
            "logging_steps": 1,
            "save_strategy": "no",
            "disable_tqdm": True,
            "log_level": "error",
            "use_cpu": True,
        }
        return args_class(**{**options, **changes})

    return build


@pytest.fixture
def make_trainer(make_args):
    """Return what builds a Trainer: names of its constructor are its parts, all others are arguments."""

    def build(trainer_class=Trainer, **changes):
        names = Trainer.__init__.__annotations__
        parts = {name: changes.pop(name) for name in list(changes) if name in names and name != "args"}
        given = changes.pop("args", None)
        if "model_init" not in parts:
            parts.setdefault("model", Net())
        parts.setdefault("train_dataset", rows())
        return trainer_class(args=given if given is not None else make_args(**changes), **parts)

    return build
