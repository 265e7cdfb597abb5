"""Data sets, collators and loaders of a run, each a function of its choices."""

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, WeightedRandomSampler

IGNORED = -100


def samples_of(run, length, seed):
    """Return the samples of a run: all are different."""
    generator = torch.Generator().manual_seed(seed)
    if run.kind in ("numbers", "classes"):
        x = torch.randn(length, 5, generator=generator)
        if run.kind == "numbers":
            return [{"x": row, "labels": row.sum(dim=0, keepdim=True)} for row in x]
        return [{"x": row, "labels": torch.tensor(int(row.abs().argmax()) % 3)} for row in x]
    ids = torch.randint(1, 17, (length, 6), generator=generator)
    if run.kind == "sentences":
        mask = torch.ones(6, dtype=torch.long)
        return [{"input_ids": row, "attention_mask": mask, "labels": row[0] % 2} for row in ids]
    if not run.ragged:
        return [{"input_ids": row, "labels": row.clone()} for row in ids]
    lengths = torch.randint(3, 7, (length,), generator=generator).tolist()
    rows = [{"input_ids": row[:n], "labels": row[:n].clone()} for row, n in zip(ids, lengths, strict=True)]
    for number, row in enumerate(rows):
        row["labels"][: number % 2] = IGNORED  # a prompt that is not learnt
    return rows


class Samples(Dataset):
    """A data set with an index; `scale` and the epoch, where it is told one, change what it gives."""

    def __init__(self, samples, noisy=False):
        self.samples, self.noisy, self.scale = samples, noisy, 1

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        sample = dict(self.samples[index])
        if self.scale != 1:
            name = "x" if "x" in sample else "input_ids"
            sample[name] = sample[name] * self.scale % 17
        if self.noisy:
            sample["x"] = sample["x"] + torch.rand(5)
        return sample


class ByEpoch(Samples):
    """A data set that gives other samples in each epoch."""

    def set_epoch(self, epoch):
        self.scale = 1 + epoch


class Stream(IterableDataset):
    """The samples one after the other."""

    def __init__(self, samples):
        self.samples = samples

    def __iter__(self):
        return iter(self.samples)


class SizedStream(Stream):
    """A stream that knows its length."""

    def __len__(self):
        return len(self.samples)


def _with_a_column(samples):
    """Add a column that no model takes."""
    return [{**sample, "note": torch.zeros(3)} for sample in samples]


def _arrow(samples):
    from datasets import Dataset as Arrow

    rows = [{name: value.tolist() for name, value in sample.items()} for sample in samples]
    return Arrow.from_list(rows).with_format("torch")


DATA = {
    "list": list,
    "torch": Samples,
    "noisy": lambda samples: Samples(samples, noisy=True),
    "epochs": ByEpoch,
    "arrow": _arrow,
    "columns": _with_a_column,
    "stream": Stream,
    "sized_stream": SizedStream,
}


def training_data(run):
    """Make the training data."""
    return DATA[run.data](samples_of(run, run.length, seed=1))


def evaluation_data(run):
    """Make the evaluation data, or two sets of it by name."""
    data = Samples(samples_of(run, run.eval_length, seed=2))
    return {"one": data, "other": Samples(samples_of(run, 3, seed=4))} if run.eval_sets else data


def stack(samples):
    """Collate by hand: pad what is ragged, stack the rest."""
    batch = {}
    for name in samples[0]:
        rows = [sample[name] for sample in samples]
        fill = IGNORED if name == "labels" else 0
        batch[name] = (
            torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=fill)
            if rows[0].dim()
            else torch.stack(rows)
        )
    if "input_ids" in batch and "attention_mask" not in batch:
        batch["attention_mask"] = batch["input_ids"].ne(0).long()
    return batch


def twice(samples):
    """Collate with inputs twice as large, as a collator that a user takes instead."""
    batch = stack(samples)
    if "x" in batch:
        batch["x"] = batch["x"] * 2
    return batch


def own_loader(run, data):
    """Make the loader that a user's own `get_train_dataloader` returns."""
    weights = torch.arange(1, run.length + 1, dtype=torch.double)
    generator = torch.Generator().manual_seed(5)
    if run.loader == "own_list":
        return list(DataLoader(data, run.batch, collate_fn=stack, drop_last=run.drop_last))
    if run.loader == "own_batches":
        order = torch.utils.data.BatchSampler(RandomSampler(data), run.batch, run.drop_last)
        return DataLoader(data, batch_sampler=order, collate_fn=stack)
    options = {
        "own": {},
        "own_shuffled": {"shuffle": True},
        "own_workers": {"shuffle": True, "num_workers": 2},
        "own_generator": {"shuffle": True, "generator": generator},
        "own_weighted": {"sampler": WeightedRandomSampler(weights, run.length)},
    }[run.loader]
    return DataLoader(data, run.batch, collate_fn=stack, drop_last=run.drop_last, **options)
