"""Runs that are stopped and gone on with: what `test_resume_matrix.py` compares, and the `resume` session counts."""

import itertools
import random
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import IterableDataset, get_worker_info

sys.path.insert(0, str(Path(__file__).parent))
from optimizer_settings import SETTINGS as OF_TR_OPTIM
from optimizer_settings import Setting as OptimizerSetting
from shared.results import history

from tr_core import Trainer, TrainingArguments, set_seed

ROWS, STEPS_OF_A_STREAM = 41, 27


class Network(nn.Module):
    """A classifier with an embedding, matrices, vectors, a norm, and dropout."""

    main_input_name = "input_ids"

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(12, 8)
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.3), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 3))

    def forward(self, input_ids, noise, labels):
        logits = self.layers(self.embedding(input_ids).mean(dim=1) + noise)
        return {"loss": nn.functional.cross_entropy(logits.float(), labels), "logits": logits}


class MatricesOnly(Network):
    """Has only matrices to train, as Muon needs."""

    def __init__(self):
        super().__init__()
        for parameter in self.parameters():
            parameter.requires_grad_(parameter.dim() == 2)


def row(index):
    generator = torch.Generator().manual_seed(index)
    length = int(torch.randint(2, 9, (), generator=generator))
    ids = torch.randint(1, 12, (length,), generator=generator)
    return {"input_ids": ids, "labels": index % 3, "length": length}


class Stream(IterableDataset):
    """Data without a length, which worker processes divide among them."""

    def __iter__(self):
        worker = get_worker_info()
        first, every = (0, 1) if worker is None else (worker.id, worker.num_workers)
        return iter([row(index) for index in range(first, ROWS, every)])


def collate_at_random(samples):
    """Pad, and draw from all three generators, as masking and augmentation do."""
    ids = nn.utils.rnn.pad_sequence([sample["input_ids"] for sample in samples], batch_first=True)
    noise = torch.randn(len(samples), 8) * random.random() + float(np.random.rand())
    return {"input_ids": ids, "noise": noise, "labels": torch.tensor([sample["labels"] for sample in samples])}


@dataclass(frozen=True)
class Setting:
    """One way to train.

    Attributes:
        order: `random`, `group_by_length`, `random_computed`, or `stream` for data without a length.
        workers: processes that load.
        accumulation: micro-batches of a step.
        bf16: whether the forward runs in bfloat16.
        asynchronous: whether checkpoints are written in the background.
        optim: name of the optimizer, its class, or one of tr-optim in one of its ways.
    """

    order: str = "random"
    workers: int = 0
    accumulation: int = 1
    bf16: bool = False
    asynchronous: bool = False
    optim: str | type | OptimizerSetting = "adamw_torch"

    def __str__(self):
        optim = f"torch.optim.{self.optim.__name__}" if isinstance(self.optim, type) else self.optim
        numbers = "bf16" if self.bf16 else "fp32"
        saves = "asynchronous" if self.asynchronous else "synchronous"
        return f"{self.order}, {self.workers} workers, accumulation {self.accumulation}, {numbers}, {saves}, {optim}"


VALUES = {
    "order": ("random", "group_by_length", "random_computed", "stream"),
    "workers": (0, 2),
    "accumulation": (1, 2),
    "bf16": (False, True),
    "asynchronous": (False, True),
}

# Without LBFGS, which calls the model itself, and SparseAdam, which takes sparse gradients only.
TORCH_OPTIMIZERS = sorted(
    (kind for kind in vars(torch.optim).values() if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)),
    key=lambda kind: kind.__name__,
)
TORCH_OPTIMIZERS = [kind for kind in TORCH_OPTIMIZERS if kind.__name__ not in ("Optimizer", "LBFGS", "SparseAdam")]
OPTIMIZERS = ["adamw_torch_fused", *TORCH_OPTIMIZERS, *OF_TR_OPTIM]


def all_settings():
    """Return every combination of the values."""
    return [Setting(**dict(zip(VALUES, values, strict=True))) for values in itertools.product(*VALUES.values())]


def optimizer_settings(**others):
    """Return a setting for every optimizer, with accumulation for those of tr-optim that allow it."""
    return [
        Setting(optim=optim, accumulation=2 if getattr(optim, "accumulates", False) else 1, **others)
        for optim in OPTIMIZERS
    ]


def pairwise_settings():
    """Return few settings, such that any two values of any two options are together in one of them."""
    wanted = {frozenset(pair) for setting in all_settings() for pair in _pairs(setting)}
    chosen = []
    while wanted:
        best = max(all_settings(), key=lambda setting: len(wanted & set(_pairs(setting))))
        chosen.append(best)
        wanted -= set(_pairs(best))
    return chosen


def _pairs(setting):
    options = [(name, getattr(setting, name)) for name in VALUES]
    return [frozenset(pair) for pair in itertools.combinations(options, 2)]


def build(setting, folder, **changes):
    """Return a Trainer of this setting that saves every step."""
    set_seed(7)
    stream = setting.order == "stream"
    options = {
        "per_device_train_batch_size": 4,
        "num_train_epochs": 3,
        "max_steps": STEPS_OF_A_STREAM if stream else -1,
        "learning_rate": 1e-2,
        "warmup_steps": 3,
        "logging_steps": 3,
        "save_steps": 1,
        "save_async": setting.asynchronous,
        "gradient_accumulation_steps": setting.accumulation,
        "dataloader_num_workers": setting.workers,
        "train_sampling_strategy": "random" if stream else setting.order,
        "bf16": setting.bf16,
        "disable_tqdm": True,
        "log_level": "error",
        "report_to": "none",
        "use_cpu": True,
        "remove_unused_columns": False,
    }
    own = {}
    if isinstance(setting.optim, str):
        options["optim"] = setting.optim
    elif isinstance(setting.optim, OptimizerSetting):
        options |= setting.optim.arguments
    else:
        own["optimizer_cls_and_kwargs"] = (setting.optim, {"lr": 1e-2})
    model = MatricesOnly() if getattr(setting.optim, "__name__", "") == "Muon" else Network()
    args = TrainingArguments(output_dir=str(folder), **{**options, **changes})
    data = Stream() if stream else [row(index) for index in range(ROWS)]
    return Trainer(model, args, data_collator=collate_at_random, train_dataset=data, **own)


def fingerprint(trainer):
    """Return what must be equal: what was logged of the training itself, weights, and the optimizer's state."""
    weights = [value.clone() for value in trainer.model.state_dict().values()]
    states = trainer.optimizer.state_dict()["state"].values()
    moments = [torch.as_tensor(state[name]) for state in states for name in sorted(state) if state[name] is not None]
    return history(trainer), weights, moments


def are_same(one, other):
    """Whether two fingerprints are equal to the last bit."""
    tensors = [*one[1], *one[2]], [*other[1], *other[2]]
    return (
        one[0] == other[0]
        and len(tensors[0]) == len(tensors[1])
        and all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(*tensors, strict=True))
    )


def steps_that_end_otherwise(setting, folder, every=1):
    """Train with a checkpoint at every step, go on from each, and return the steps from which the end differs.

    Args:
        setting: how to train.
        folder: empty or absent; holds the checkpoints.
        every: go on from each so many-th step only.

    Returns:
        The steps from which the end differs, and how many were gone on from.
    """
    alone = build(setting, folder)
    alone.train()
    end, last = fingerprint(alone), alone.state.max_steps
    assert last >= 15
    different, resume = [], partial(build, setting, folder, save_strategy="no")
    steps = range(1, last, every)
    for step in steps:
        resumed = resume()
        resumed.train(resume_from_checkpoint=str(folder / f"checkpoint-{step}"))
        if not are_same(end, fingerprint(resumed)):
            different.append(step)
    return different, len(steps)
