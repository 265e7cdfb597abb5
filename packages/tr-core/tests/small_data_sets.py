"""Data sets that fail or follow the epoch: in a module of its own, which a process that is started anew can import."""

import torch
from small_models import samples
from torch.utils.data import IterableDataset


class Following:
    """Each sample holds the epoch that the data set was last given."""

    def __init__(self, number=20):
        self.rows, self.epoch, self.calls, self.scale = samples(number), -1, [], 1.0

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        row = self.rows[index]
        return {"x": row["x"] * self.scale, "labels": row["labels"], "epoch": self.epoch}

    def set_epoch(self, epoch):
        self.epoch = epoch
        self.calls.append(epoch)


class Failing:
    """Raises an error at one sample."""

    def __init__(self, error, bad=11, number=20):
        self.rows, self.error, self.bad = samples(number), error, bad

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        if index == self.bad:
            raise self.error
        return self.rows[index]


class FailingTogether(Failing):
    """Gives several samples at a time."""

    def __getitems__(self, indices):
        return [self[index] for index in indices]


class FailingStream(IterableDataset):
    """Raises an error before it gives the sample of one position."""

    def __init__(self, error, bad=11, number=20):
        self.rows, self.error, self.bad = samples(number), error, bad

    def __iter__(self):
        for position, row in enumerate(self.rows):
            if position == self.bad:
                raise self.error
            yield row


class FailingCollator:
    """Raises an error for the batch that holds one sample."""

    def __init__(self, error, bad):
        self.error, self.bad = error, bad

    def __call__(self, rows):
        if any(torch.equal(row["x"], self.bad) for row in rows):
            raise self.error
        return {name: torch.stack([row[name] for row in rows]) for name in ("x", "labels")}


def keep(rows):
    """Collate rows, with their epochs as labels; a spawned process finds it here, and not in a test module."""
    return {"x": torch.stack([row["x"] for row in rows]), "labels": torch.tensor([row["epoch"] for row in rows]) % 3}
