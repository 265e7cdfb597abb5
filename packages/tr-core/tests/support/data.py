"""Rows, data sets, streams, collators and a tokenizer; processes that are spawned can import them from here."""

import torch
from torch.utils.data import IterableDataset, get_worker_info


def samples(number, seed=0):
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(number, 8, generator=generator)
    return [{"x": row, "labels": (row.sum() > 0).long() + (row[0] > 1).long()} for row in features]


def stack(rows):
    """Make one batch of rows that hold the same tensors."""
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def sentences(firsts=(3, 1, 2, 5, 4), length=4):
    return [{"input_ids": torch.tensor([n] * length), "labels": torch.tensor([n, n + 1])} for n in firsts]


class MapStyle:
    """A data set of rows that is not a list, and notes which sample was asked for."""

    def __init__(self, rows):
        self.rows, self.asked = rows, []

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        self.asked.append(index)
        return self.rows[index]


class Stream(IterableDataset):
    """Gives rows in their order, and counts how often it was begun."""

    def __init__(self, rows):
        self.rows, self.begun = rows, 0

    def __iter__(self):
        self.begun += 1
        return iter(self.rows)


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


class Shared(IterableDataset):
    """A stream that divides its rounds of two samples among the workers, and follows the epoch."""

    def __init__(self, number=12):
        self.number, self.epoch = number, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        worker = get_worker_info()
        part, parts = (0, 1) if worker is None else (worker.id, worker.num_workers)
        return (100 * self.epoch + i for i in range(self.number) if (i // 2) % parts == part)


def noisy(rows):
    return [(row, float(torch.rand(()))) for row in rows]


class ToyTokenizer:
    """Knows the ids 0 to 99: 0 pads, 1 begins, 2 ends a text, 3 masks.

    Args:
        padding_side: where rows are filled.
        changes: attributes that are other than said.
    """

    model_input_names = ("input_ids", "attention_mask")

    def __init__(self, padding_side="right", **changes):
        self.padding_side = padding_side
        self.pad_token_id, self.eos_token_id, self.mask_token_id = 0, 2, 3
        vars(self).update(changes)

    def __len__(self):
        return 100

    def get_special_tokens_mask(self, ids, already_has_special_tokens):
        assert already_has_special_tokens
        return [int(number in (0, 1, 2, 3)) for number in ids]

    def pad(self, features, return_tensors, padding=True, max_length=None, pad_to_multiple_of=None):
        assert return_tensors == "pt"
        fillers = {"input_ids": self.pad_token_id, "attention_mask": 0, "special_tokens_mask": 1}
        rows = [{"attention_mask": [1] * len(feature["input_ids"]), **feature} for feature in features]
        width = max_length if padding == "max_length" else max(len(row["input_ids"]) for row in rows)
        width = -(-width // (pad_to_multiple_of or 1)) * (pad_to_multiple_of or 1)
        batch = {}
        for name in rows[0]:
            values = [row[name] for row in rows]
            if name in fillers and padding not in (False, "do_not_pad"):
                fill = [[fillers[name]] * (width - len(value)) for value in values]
                left = self.padding_side == "left"
                values = [f + list(v) if left else list(v) + f for v, f in zip(values, fill, strict=True)]
            batch[name] = torch.tensor(values)
        return batch
