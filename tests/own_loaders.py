"""Loaders that users make themselves, each kind a function of one line or two; and a small Trainer that takes one."""

import random

import numpy as np
import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from tr_core import Trainer, TrainerCallback, TrainingArguments

ROWS, BATCH, STEPS_AN_EPOCH, EPOCHS = 22, 4, 6, 3
WEIGHTS = [1.0 + index % 5 for index in range(ROWS)]


class Rows:
    """Rows of numbers; with `source` they get noise from one of the random number generators."""

    def __init__(self, source=None):
        self.values = torch.randn(ROWS, 8, generator=torch.Generator().manual_seed(1))
        self.source, self.own = source, np.random.default_rng(7)

    def __len__(self):
        return ROWS

    def __getitem__(self, index):
        noise = {
            None: lambda: 0.0,
            "torch": lambda: torch.rand(()).item(),
            "numpy": lambda: np.random.random(),
            "python": lambda: random.random(),
            "own": lambda: self.own.random(),
        }[self.source]()
        return {"x": self.values[index] + noise, "labels": index % 3, "index": index}


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 12), nn.Dropout(0.3), nn.GELU(), nn.Linear(12, 3))

    def forward(self, x, labels, index):
        logits = self.layers(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class ByTheEpoch(Sampler):
    """Follows `set_epoch`."""

    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return ROWS

    def __iter__(self):
        order = list(range(ROWS))
        random.Random(self.epoch).shuffle(order)
        return iter(order)


class Bucketed(Sampler):
    """A batch sampler that draws from each of the global generators when an epoch begins."""

    def __len__(self):
        return STEPS_AN_EPOCH

    def __iter__(self):
        order = np.random.permutation(ROWS).tolist()
        batches = [order[i : i + BATCH] for i in range(0, ROWS, BATCH)]
        random.shuffle(batches)
        return iter(batches)


class Drawing(Sampler):
    """A batch sampler that draws each batch when it is asked for, from a generator of its own."""

    def __init__(self):
        self.random = random.Random(3)

    def __len__(self):
        return STEPS_AN_EPOCH

    def __iter__(self):
        for _ in range(STEPS_AN_EPOCH):
            yield self.random.sample(range(ROWS), BATCH)


class Plain:
    """No DataLoader: an object with `__iter__` that draws its order."""

    def __init__(self):
        self.rows, self.rng = Rows(), np.random.default_rng(2)

    def __len__(self):
        return STEPS_AN_EPOCH

    def __iter__(self):
        order = self.rng.permutation(ROWS).tolist()
        for start in range(0, ROWS, BATCH):
            yield torch.utils.data.default_collate([self.rows[i] for i in order[start : start + BATCH]])


class RandomLengths(torch.utils.data.IterableDataset):
    """A stream that shuffles itself with Python's generator."""

    def __iter__(self):
        order = list(range(ROWS))
        random.shuffle(order)
        rows = Rows()
        return iter([rows[index] for index in order])


def seeded(seed=5):
    return torch.Generator().manual_seed(seed)


def collating(rng):
    """A collator that has its generator in a closure."""

    def collate(rows):
        batch = torch.utils.data.default_collate(rows)
        return {**batch, "x": batch["x"] + rng.random()}

    return collate


def load(**options):
    data = options.pop("data", None) or Rows()
    kind = options.pop("kind", DataLoader)
    return kind(data, **({} if "batch_sampler" in options else {"batch_size": BATCH}), **options)


IN_THIS_PROCESS = {
    "shuffled": lambda: load(shuffle=True),
    "shuffled, given a generator": lambda: load(shuffle=True, generator=seeded()),
    "in order": lambda: load(),
    "weighted": lambda: load(sampler=WeightedRandomSampler(WEIGHTS, ROWS)),
    "weighted, given a generator": lambda: load(sampler=WeightedRandomSampler(WEIGHTS, ROWS, generator=seeded())),
    "with replacement": lambda: load(sampler=RandomSampler(range(ROWS), replacement=True)),
    "with replacement, given a generator": lambda: load(
        sampler=RandomSampler(range(ROWS), replacement=True, num_samples=ROWS, generator=seeded())
    ),
    "a subset at random": lambda: load(sampler=SubsetRandomSampler(list(range(ROWS)))),
    "a batch sampler": lambda: load(batch_sampler=BatchSampler(RandomSampler(range(ROWS)), BATCH, False)),
    "a batch sampler in order": lambda: load(batch_sampler=BatchSampler(SequentialSampler(range(ROWS)), BATCH, False)),
    "a batch sampler given a generator": lambda: load(
        batch_sampler=BatchSampler(RandomSampler(range(ROWS), generator=seeded()), BATCH, False)
    ),
    "a sampler for ranks": lambda: load(sampler=DistributedSampler(Rows(), num_replicas=1, rank=0)),
    "a sampler that follows the epoch": lambda: load(sampler=ByTheEpoch()),
    "a batch sampler of its own": lambda: load(batch_sampler=Bucketed()),
    "a batch sampler that draws as it goes": lambda: load(batch_sampler=Drawing()),
    "noise of torch": lambda: load(data=Rows("torch"), shuffle=True),
    "noise of numpy": lambda: load(data=Rows("numpy"), shuffle=True),
    "noise of Python": lambda: load(data=Rows("python"), shuffle=True, generator=seeded()),
    "noise of a generator of the data set's": lambda: load(data=Rows("own"), shuffle=True),
    "noise of a generator in a closure": lambda: load(collate_fn=collating(np.random.default_rng(1)), shuffle=True),
    "prepared": lambda: Accelerator(cpu=True).prepare(load(shuffle=True)),
    "prepared, given a generator": lambda: Accelerator(cpu=True).prepare(load(shuffle=True, generator=seeded())),
    "prepared, weighted": lambda: Accelerator(cpu=True).prepare(load(sampler=WeightedRandomSampler(WEIGHTS, ROWS))),
    "stateful": lambda: load(kind=StatefulDataLoader),
    "stateful, weighted": lambda: load(kind=StatefulDataLoader, sampler=WeightedRandomSampler(WEIGHTS, ROWS)),
    "stateful, a batch sampler of torch": lambda: load(
        kind=StatefulDataLoader, batch_sampler=BatchSampler(RandomSampler(range(ROWS)), BATCH, False)
    ),
    "stateful, noise of torch": lambda: load(kind=StatefulDataLoader, data=Rows("torch")),
    "stateful, a batch sampler of its own": lambda: load(kind=StatefulDataLoader, batch_sampler=Bucketed()),
    "no DataLoader": Plain,
    "a stream": lambda: load(data=RandomLengths()),
}

WITH_WORKERS = {
    "workers": lambda: load(shuffle=True, num_workers=2),
    "workers, given a generator": lambda: load(shuffle=True, num_workers=2, generator=seeded()),
    "workers, with replacement": lambda: load(
        sampler=RandomSampler(range(ROWS), replacement=True, generator=seeded()), num_workers=2
    ),
    "workers, noise of torch": lambda: load(data=Rows("torch"), shuffle=True, num_workers=2),
    "workers that live on": lambda: load(shuffle=True, num_workers=2, persistent_workers=True),
    "workers that live on, prepared": lambda: Accelerator(cpu=True).prepare(
        load(shuffle=True, num_workers=2, persistent_workers=True)
    ),
}

KINDS = {**IN_THIS_PROCESS, **WITH_WORKERS}


class Seen(TrainerCallback):
    """Notes the samples of each micro-batch."""

    def __init__(self):
        self.samples = []

    def on_micro_batch_end(self, args, state, control, inputs=None, **kwargs):
        self.samples.append(inputs["index"].tolist())


class WithOwnLoader(Trainer):
    make_loader = None

    def get_train_dataloader(self):
        return self.make_loader()


SAMPLERS = {
    "weighted, given a generator": lambda: WeightedRandomSampler(WEIGHTS, ROWS, generator=seeded()),
    "weighted": lambda: WeightedRandomSampler(WEIGHTS, ROWS),
    "with replacement, given a generator": lambda: RandomSampler(
        range(ROWS), replacement=True, num_samples=ROWS, generator=seeded()
    ),
    "of a generator of NumPy": lambda: Shuffled(),
}


class Shuffled(Sampler):
    """Shuffles with a generator that goes on from epoch to epoch."""

    def __init__(self):
        self.rng = np.random.default_rng(3)

    def __len__(self):
        return ROWS

    def __iter__(self):
        return iter(self.rng.permutation(ROWS).tolist())


class WithOwnSampler(Trainer):
    make_sampler = None

    def _get_train_sampler(self, dataset):
        return self.make_sampler()


def train(kind, folder, *, resume=None, seed=0, **changes):
    """Train three epochs over a loader of a kind; return the samples of each step and the weights."""
    torch.manual_seed(0)
    model, seen = Network(), Seen()
    for scatter in (torch.manual_seed, np.random.seed, random.seed):
        scatter(seed)  # another process has other numbers
    arguments = {
        "output_dir": str(folder),
        "per_device_train_batch_size": BATCH,
        "num_train_epochs": EPOCHS,
        "save_strategy": "no",
        "learning_rate": 0.01,
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "log_level": "error",
    }
    args = TrainingArguments(**{**arguments, **changes})
    if kind in KINDS:
        trainer = WithOwnLoader(model=model, args=args, callbacks=[seen])
        trainer.make_loader = KINDS[kind]
    else:
        data = Rows("own" if "own generator" in kind else None)
        trainer = WithOwnSampler(model=model, args=args, callbacks=[seen], train_dataset=data)
        trainer.make_sampler = SAMPLERS.get(kind.removeprefix("sampler: "), lambda: None)
    trainer.train(resume_from_checkpoint=resume)
    return seen.samples, model.state_dict()
