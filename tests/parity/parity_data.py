"""Data of the scenarios: small, made of a seed, with names that the models take."""

from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset

IGNORED = -100


class Samples(Dataset[dict[str, Any]]):
    """A list of samples."""

    def __init__(self, samples: list[dict[str, Any]]) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.samples[index]


class Stream(IterableDataset[dict[str, Any]]):
    """The same samples, one after the other and without a length."""

    def __init__(self, samples: Samples) -> None:
        self.samples = samples

    def __iter__(self) -> Any:
        return iter(self.samples.samples)


def regression(count: int = 18, width: int = 5, seed: int = 1) -> Samples:
    """Return samples `x` (width) → `labels` (1)."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, width, generator=generator)
    y = x.sum(dim=1, keepdim=True) + 0.3 * torch.randn(count, 1, generator=generator)
    return Samples([{"x": x[i], "labels": y[i]} for i in range(count)])


def classes(count: int = 18, width: int = 5, num_classes: int = 3, seed: int = 2) -> Samples:
    """Return samples `x` (width) → `labels`, a class."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, width, generator=generator)
    return Samples([{"x": x[i], "labels": int(x[i].abs().argmax()) % num_classes} for i in range(count)])


def tokens(count: int = 10, length: int = 8, vocabulary: int = 17, seed: int = 3, masked: bool = True) -> Samples:
    """Return token sequences as their own targets; with `masked`, a prefix of a different length of each is ignored."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, vocabulary, (count, length), generator=generator)
    samples = []
    for row in ids:
        labels = row.clone()
        if masked:
            labels[: int(torch.randint(0, length - 1, (), generator=generator))] = IGNORED
        samples.append({"input_ids": row, "labels": labels})
    return Samples(samples)


def ragged_tokens(count: int = 9, vocabulary: int = 17, seed: int = 4) -> Samples:
    """Return token sequences of different lengths, sorted by nothing: a batch is padded by `pad_tokens`."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, 9, (count,), generator=generator).tolist()
    ids = [torch.randint(0, vocabulary, (length,), generator=generator) for length in lengths]
    return Samples([{"input_ids": row, "labels": row.clone()} for row in ids])


def pad_tokens(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Pad a batch of `ragged_tokens` to its longest sequence."""

    def pad(name: str, value: int) -> torch.Tensor:
        rows = [sample[name] for sample in samples]
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=value)

    ids = pad("input_ids", 0)
    mask = torch.nn.utils.rnn.pad_sequence(
        [torch.ones(len(sample["input_ids"]), dtype=torch.long) for sample in samples], batch_first=True
    )
    return {"input_ids": ids, "attention_mask": mask, "labels": pad("labels", IGNORED)}


def sentences(count: int = 12, length: int = 6, vocabulary: int = 17, num_classes: int = 2, seed: int = 5) -> Samples:
    """Return token sequences, each with a class."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, vocabulary, (count, length), generator=generator)
    mask = torch.ones(length, dtype=torch.long)
    return Samples([{"input_ids": r, "attention_mask": mask, "labels": int(r[0]) % num_classes} for r in ids])
