"""Loaders that users make themselves, each kind a function of one line or two; and a small Trainer that takes one."""

import random
from functools import partial

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


MAKERS = {"torch": lambda seed: seeded(seed), "NumPy": np.random.default_rng, "Python": random.Random}


def permuted(generator, count):
    if isinstance(generator, torch.Generator):
        return torch.randperm(count, generator=generator).tolist()
    if isinstance(generator, np.random.Generator):
        return generator.permutation(count).tolist()
    return generator.sample(range(count), count)


def reseed(generator, seed):
    if isinstance(generator, torch.Generator):
        generator.manual_seed(seed)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = np.random.default_rng(seed).bit_generator.state
    else:
        generator.seed(seed)


class Drawn(Sampler):
    """A batch sampler that draws all batches at once or each when it is asked for, from a generator of its own.

    `made` says when: "in __init__", "in set_epoch" or "in __iter__"; "and seeded in set_epoch" is made once and seeded
    anew.
    """

    generator = None

    def __init__(self, of, made, at_once, shared=None):
        self.of, self.made, self.at_once = of, made, at_once
        if made in ("in __init__", "and seeded in set_epoch"):
            self.generator = shared or MAKERS[of](3)

    def set_epoch(self, epoch):
        if self.made == "in set_epoch":
            self.generator = MAKERS[self.of](epoch)
        elif self.made == "and seeded in set_epoch":
            reseed(self.generator, epoch)

    def __len__(self):
        return STEPS_AN_EPOCH

    def __iter__(self):
        if self.made == "in __iter__":
            self.generator = MAKERS[self.of](int(torch.randint(1000, ())))
        order = permuted(self.generator, ROWS)
        for start in range(0, ROWS, BATCH):
            yield order[start : start + BATCH] if self.at_once else permuted(self.generator, ROWS)[:BATCH]


class OrderOfTheEpoch(Sampler):
    """A batch sampler that draws its order in `set_epoch`, from a generator of its own or from the global one."""

    def __init__(self, of):
        self.generator = MAKERS[of](3) if of else None

    def set_epoch(self, epoch):
        self.order = permuted(self.generator, ROWS) if self.generator else torch.randperm(ROWS).tolist()

    def __len__(self):
        return STEPS_AN_EPOCH

    def __iter__(self):
        return iter([self.order[start : start + BATCH] for start in range(0, ROWS, BATCH)])


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


class OneByOne(Sampler):
    """Draws each sample when it is asked for."""

    def __init__(self):
        self.random = random.Random(3)

    def __len__(self):
        return ROWS

    def __iter__(self):
        return (self.random.randrange(ROWS) for _ in range(ROWS))


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
    "stateful, a batch sampler of torch with replacement": lambda: load(
        kind=StatefulDataLoader,
        data=Rows("own"),
        batch_sampler=BatchSampler(
            RandomSampler(range(ROWS), replacement=True, num_samples=ROWS, generator=seeded()), BATCH, False
        ),
    ),
    "stateful, a batch sampler that draws as it goes": lambda: load(
        kind=StatefulDataLoader, batch_sampler=Drawn("torch", "and seeded in set_epoch", at_once=False)
    ),
    "stateful, batches of a sampler that draws as it goes": lambda: load(
        kind=StatefulDataLoader, batch_sampler=BatchSampler(OneByOne(), BATCH, False)
    ),
    "a batch sampler that draws in set_epoch": lambda: load(batch_sampler=OrderOfTheEpoch("torch")),
    "a batch sampler that draws in set_epoch from torch's generator": lambda: load(batch_sampler=OrderOfTheEpoch(None)),
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

DRAWN = {
    f"{of}, made {made}, drawn {'at once' if at_once else 'batch by batch'}": (of, made, at_once)
    for of in MAKERS
    for made in ("in __init__", "in set_epoch", "and seeded in set_epoch", "in __iter__")
    for at_once in (True, False)
}


def drawn(kind, num_workers):
    """Make a loader of a kind of `DRAWN`."""
    return load(batch_sampler=Drawn(*DRAWN[kind]), num_workers=num_workers)


def sharing_a_generator():
    """A batch sampler that draws as it goes, and a data set that draws from its generator too."""
    data = Rows("own")
    return load(data=data, batch_sampler=Drawn("NumPy", "in __init__", at_once=False, shared=data.own))


KINDS = {
    **IN_THIS_PROCESS,
    **WITH_WORKERS,
    **{f"{kind}, {workers} workers": partial(drawn, kind, workers) for kind in DRAWN for workers in (0, 2)},
    "a generator that sampler and data share": sharing_a_generator,
}


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
    "that draws in set_epoch": lambda: ShuffledByTheEpoch(),
}


class Shuffled(Sampler):
    """Shuffles with a generator that goes on from epoch to epoch."""

    def __init__(self):
        self.rng = np.random.default_rng(3)

    def __len__(self):
        return ROWS

    def __iter__(self):
        return iter(self.rng.permutation(ROWS).tolist())


class ShuffledByTheEpoch(Shuffled):
    """Draws its order when it is told the epoch."""

    def set_epoch(self, epoch):
        self.order = self.rng.permutation(ROWS).tolist()

    def __iter__(self):
        return iter(self.order)


class WithOwnSampler(Trainer):
    make_sampler = None

    def _get_train_sampler(self, dataset):
        sampler = self.make_sampler()
        if dataset.source == "own" and sampler is not None:
            sampler.rng = dataset.own
        return sampler


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
        name = kind.removeprefix("sampler: ").removesuffix(", data with its own generator")
        trainer.make_sampler = SAMPLERS.get(name, lambda: None)
    trainer.train(resume_from_checkpoint=resume)
    return seen.samples, model.state_dict()
