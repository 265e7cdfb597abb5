"""Collect the outputs of evaluation batches: moved to the host now and then, joined once at the end."""

from __future__ import annotations

from typing import Any

import torch

from tr_core.evaluation.outputs import map_objects, map_tensors
from tr_core.evaluation.rows import Rows

# Outputs stay on an accelerator until they hold this much, so that a batch costs no wait and memory stays bounded.
DEVICE_LIMIT_BYTES = 256 * 2**20

_NOTHING_YET = object()


class Collected:
    """The outputs of one kind, batch by batch, until `arrays` joins them.

    A list in them holds objects of any kind; tuples and dicts hold tensors, lists, and None.

    Args:
        expected: samples that there will be, None where that is not known.
        concatenate: join the batches; else they stay apart, one entry a batch.
    """

    def __init__(self, expected: int | None = None, *, concatenate: bool = True) -> None:
        self._expected, self._concatenate = expected, concatenate
        self._on_device: list[Any] = []
        self._bytes = 0
        self._joined: Any = _NOTHING_YET
        self._batches: list[Any] = []

    def add(self, tree: Any, flush: bool = False) -> None:
        """Keep a batch's outputs; `flush` moves everything held on the device to the host now.

        Raises:
            ValueError: they are made up otherwise than those of earlier batches.
        """
        self._on_device.append(tree)
        self._is_on_host = True
        map_tensors(self._weigh, tree)
        # What is on the host already is put away while it is in the processor's cache.
        if flush or self._is_on_host or self._bytes > DEVICE_LIMIT_BYTES:
            self._flush()

    def arrays(self) -> Any:
        """Return NumPy arrays of all samples, shaped as the outputs, and forget them; None if there were none.

        Batches are joined, with the second dimension padded with -100, or a list with one entry a batch.
        """
        self._flush()
        if not self._concatenate:
            return None if all(batch is None for batch in self._batches) else self._batches
        joined, self._joined = self._joined, _NOTHING_YET
        return None if joined is _NOTHING_YET else _join(joined)

    def _weigh(self, tensor: torch.Tensor) -> None:
        self._bytes += tensor.numel() * tensor.element_size()
        self._is_on_host = self._is_on_host and tensor.device.type == "cpu"

    def _flush(self) -> None:
        for tree in self._on_device:
            if self._concatenate:
                self._joined = _append(self._joined, tree, self._expected)
            else:
                self._batches.append(_apart(tree))
        self._on_device.clear()
        self._bytes = 0


def _append(kept: Any, tree: Any, expected: int | None) -> Any:
    """Add a batch to what is kept of all before it and return that."""
    is_first = kept is _NOTHING_YET
    if not is_first and _outline(kept) != _outline(tree):
        raise ValueError(
            f"the outputs of two batches of an evaluation have different structures: {_outline(kept)} before, "
            f"{_outline(tree)} now; leave out what differs with ignore_keys or preprocess_logits_for_metrics"
        )
    if isinstance(tree, torch.Tensor):
        rows = Rows(expected) if is_first else kept
        rows.add(tree)
        return rows
    if isinstance(tree, list):
        objects = [] if is_first else kept
        objects += map_objects(_object_to_numpy, tree)
        return objects
    if isinstance(tree, tuple):
        parts = (_NOTHING_YET,) * len(tree) if is_first else kept
        return tuple(_append(part, item, expected) for part, item in zip(parts, tree, strict=True))
    if isinstance(tree, dict):
        named = dict.fromkeys(tree, _NOTHING_YET) if is_first else kept
        return {key: _append(named[key], value, expected) for key, value in tree.items()}
    return None


def _outline(tree: Any) -> str:
    if isinstance(tree, dict):
        return f"a dict of {sorted(map(str, tree))}"
    if isinstance(tree, tuple):
        return f"a tuple of {len(tree)}"
    if tree is None:
        return "nothing"
    return "a list of objects" if isinstance(tree, list) else "a tensor"


def _join(kept: Any) -> Any:
    if isinstance(kept, Rows):
        return kept.join()
    if isinstance(kept, tuple):
        return tuple(_join(part) for part in kept)
    if isinstance(kept, dict):
        return {key: _join(part) for key, part in kept.items()}
    return kept


def _apart(tree: Any) -> Any:
    """Return one batch as arrays, shaped as the outputs."""
    if isinstance(tree, torch.Tensor):
        rows = Rows(len(tree) if tree.dim() else 1)
        rows.add(tree)
        return rows.join()
    if isinstance(tree, tuple):
        return tuple(_apart(item) for item in tree)
    if isinstance(tree, dict):
        return {key: _apart(value) for key, value in tree.items()}
    return map_objects(_object_to_numpy, tree)


def _object_to_numpy(tensor: torch.Tensor) -> Any:
    tensor = tensor.detach().cpu()
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()
