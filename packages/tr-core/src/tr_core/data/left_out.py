"""Leave samples out of training by a list of their indices in the data set (`leave_out_samples`).

The list is JSON: `{"number_of_samples": N, "samples": [{"index": I, "reason": TEXT, "digest": HEX}, ...]}`. Only the
indices are required. N is the length of the data set. A digest tells by value that the data set still has that sample
at its index; without one that cannot be seen.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch.utils.data import Subset

from tr_core.data.fetch import content_of, epoch_listeners
from tr_core.data.loaders import is_map_style
from tr_core.protocols import Collectives
from tr_core.random_state import separate_randomness
from tr_log.line_file import write_whole

Entry = dict[str, Any]
NOTHING = "none"


class Remaining(Subset[Any]):
    """The samples of a data set that are not left out, in their order.

    Args:
        dataset: map-style data.
        entries: the samples to leave out.

    Attributes:
        entries: the same.
    """

    def __init__(self, dataset: Any, entries: list[Entry]) -> None:
        self.entries, out = entries, {entry["index"] for entry in entries}
        kept: Any = array("q", (index for index in range(len(dataset)) if index not in out))  # 8 bytes a sample
        super().__init__(dataset, kept)


def left_out_of(dataset: Any) -> str:
    """Return how many samples are left out of a data set, with a digest of their indices; `none` without a list."""
    if not isinstance(dataset, Remaining):
        return NOTHING
    indices = sorted(entry["index"] for entry in dataset.entries)
    return f"{len(indices)} of {len(dataset.dataset)} ({hashlib.sha256(repr(indices).encode()).hexdigest()[:8]})"  # type: ignore[arg-type]


def remaining(dataset: Any, path: str) -> Remaining:
    """Return a data set without the samples that the list in a file names.

    Raises:
        ValueError: the file is no such list, or the list of another data set; or the data has no indices.
    """
    what = f"leave_out_samples={path!r}"
    if not is_map_style(dataset):
        raise ValueError(
            f"{what} names samples by their index, and {type(dataset).__name__} is iterable data, which has none; give "
            "data with __len__ and __getitem__, or leave the samples out where the data is made"
        )
    try:
        held = json.loads(Path(path).read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"the list of samples {path!r} cannot be read: {error}") from error
    given, number = (held.get("samples"), held.get("number_of_samples")) if isinstance(held, dict) else (None, None)
    if not (isinstance(given, list) and all(map(_is_entry, given)) and isinstance(number, int | None)):
        raise ValueError(
            f"{path!r} is no list of samples; needed is JSON such as "
            '{"number_of_samples": 100, "samples": [{"index": 3, "reason": "no label"}]}'
        )
    entries = {entry["index"]: entry for entry in given}
    if number not in (None, len(dataset)):
        raise ValueError(f"{what} is the list of {number} samples, and this data set has {len(dataset)}: {_ANOTHER}")
    for index, entry in entries.items():
        if not 0 <= index < len(dataset):
            raise ValueError(f"{what} names {index}, and the data set has {len(dataset)} samples, from 0: {_ANOTHER}")
        if entry.get("digest") is not None and digest_of(dataset, index) not in (entry["digest"], None):
            raise ValueError(f"{what}: sample {index} is not the one that was listed: {_ANOTHER}")
    if len(entries) == len(dataset):
        raise ValueError(f"{what} leaves out all {len(dataset)} samples; train on some")
    return Remaining(dataset, list(entries.values()))


_ANOTHER = "give the list that was made for this data, or make a new one with `trainer blame --leave-out`"


def check_left_out(loader: Any, dataset: Any, collectives: Collectives, *, is_own: bool) -> None:
    """Refuse a list that a loader or a sampler does not follow, or that differs between ranks. Collective.

    Args:
        loader: of the training data.
        dataset: the Trainer's own.
        collectives: this process among the others.
        is_own: whether the user's code made the loader.
    """
    if not isinstance(dataset, Remaining):
        if dataset is None:
            raise ValueError("leave_out_samples takes samples from train_dataset, which is None; give one")
        return
    if is_own and getattr(loader, "dataset", None) is not dataset:
        raise ValueError(
            "leave_out_samples takes samples from train_dataset, and the loader of get_train_dataloader has other "
            "data: make it of self.train_dataset, or leave the samples out of its data yourself"
        )
    weights = getattr(getattr(getattr(loader, "batch_sampler", None), "_sampler", None), "weights", None)
    if weights is not None and len(weights) != len(dataset):
        raise ValueError(
            f"the sampler has {len(weights)} weights, and with leave_out_samples there are {len(dataset)} samples: "
            "take the weights of the data set that _get_train_sampler is given, by its indices"
        )
    if len(set(lists := collectives.gather_objects(left_out_of(dataset)))) > 1:
        raise ValueError(f"leave_out_samples names other samples on some ranks ({lists}, by rank): give all one file")


def _is_entry(entry: Any) -> bool:
    return isinstance(entry, dict) and type(entry.get("index")) is int


def add_to_list(path: str | Path, dataset: Any, new: Iterable[Entry]) -> int:
    """Add samples to the list in a file, which is made if it is not there; return how many it names.

    Args:
        path: the file.
        dataset: the data; samples that are left out of it are added too.
        new: the samples, by their indices in the whole data.

    Raises:
        ValueError: the file is the list of another data set.
    """
    if isinstance(dataset, Remaining):
        new, dataset = [*new, *dataset.entries], dataset.dataset
    known = remaining(dataset, str(path)).entries if Path(path).exists() else []
    merged = {entry["index"]: entry for entry in (*new, *known)}
    for entry in merged.values():
        entry.setdefault("digest", digest_of(dataset, entry["index"]))
    held = {"number_of_samples": len(dataset), "samples": [merged[index] for index in sorted(merged)]}
    write_whole(Path(path).absolute(), (json.dumps(held, indent=1) + "\n").encode())
    return len(merged)


def digest_of(dataset: Any, index: int) -> str | None:
    """Return a digest of what a sample holds; None if reading it again gives other values."""
    if epoch_listeners(dataset):
        return None
    found = set()
    for seed in (0, 1):
        with separate_randomness(seed):
            found.add(f"{content_of([dataset[index]]):08x}")
    return found.pop() if len(found) == 1 else None
