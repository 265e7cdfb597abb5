"""Map over the outputs of a model, and gather those of all ranks in the order of the data."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from typing import Any

import torch

from tr_core.protocols import Collectives

PADDING = -100


def map_tensors(function: Callable[[torch.Tensor], Any], tree: Any) -> Any:
    """Apply a function to every tensor inside tuples, lists and mappings; other leaves become None."""
    if isinstance(tree, torch.Tensor):
        return function(tree)
    if isinstance(tree, list | tuple):
        return tuple(map_tensors(function, item) for item in tree)
    if hasattr(tree, "items"):
        return {key: map_tensors(function, value) for key, value in tree.items()}
    return None


def map_objects(function: Callable[[torch.Tensor], Any], tree: Any) -> Any:
    """Apply a function to every tensor inside tuples, lists and mappings; other leaves do not change."""
    if isinstance(tree, torch.Tensor):
        return function(tree)
    if isinstance(tree, list | tuple):
        items = [map_objects(function, item) for item in tree]
        return items if isinstance(tree, list) else tuple(items)
    if isinstance(tree, Mapping):
        return {key: map_objects(function, value) for key, value in tree.items()}
    return tree


def outline(tree: Any, *, objects: bool) -> str:
    """Describe what of a tree is gathered. `objects`: by `gather_objects`, and not by `gather_tree`."""
    if isinstance(tree, torch.Tensor):
        return "a tensor"
    if isinstance(tree, tuple) or (isinstance(tree, list) and not objects):
        return f"({', '.join(outline(item, objects=objects) for item in tree)})"
    if not isinstance(tree, list) and hasattr(tree, "items"):
        named = (f"{name!r}: {outline(value, objects=objects)}" for name, value in tree.items())
        return f"{{{', '.join(named)}}}"
    return "nothing" if tree is None or not objects else "objects"


def check_same_on_ranks(mine: str, strategy: Collectives, what: str) -> None:
    """Refuse on all ranks a batch that is another on each of them, before an exchange that only some would make.

    Collective: one exchange of a number, on the host.

    Args:
        mine: what this rank has.
        strategy: exchanges it.
        what: the batch, for the error.

    Raises:
        ValueError: two ranks differ.
    """
    if strategy.world_size == 1:
        return
    number = zlib.crc32(mine.encode())
    highest, negated_lowest = strategy.all_reduce_max([number, -number])()
    if highest != -negated_lowest:
        has = "; ".join(f"rank {rank} has {text}" for rank, text in enumerate(strategy.gather_objects(mine)))
        raise ValueError(
            f"{what} differs between ranks, and cannot be joined: {has}. Give every sample labels, or none; leave "
            "out an output that only some batches have, with ignore_keys or preprocess_logits_for_metrics"
        )


def gather_tree(tree: Any, strategy: Collectives, count: int | None) -> Any:
    """Join the rows of every tensor in a tree by `gather_rows`; leaves that are not tensors become None."""
    return None if tree is None else map_tensors(lambda tensor: gather_rows(tensor, strategy, count), tree)


def gather_objects(tree: Any, strategy: Collectives, count: int | None, counts: bool) -> Any:
    """Join a tree with leaves that are not tensors: those become lists of all ranks' objects.

    A list holds one object for each sample; any other leaf that is not a tensor is one object of its batch. In tuples
    and mappings, `gather_rows` joins the tensors. `counts` is False where this rank's samples are fillers.
    """
    if tree is None:
        return None
    if isinstance(tree, torch.Tensor):
        return gather_rows(tree, strategy, count)
    if isinstance(tree, tuple):
        return tuple(gather_objects(item, strategy, count, counts) for item in tree)
    if isinstance(tree, Mapping):
        return {key: gather_objects(value, strategy, count, counts) for key, value in tree.items()}
    # Pickled with its tensors: on the host, so that every rank can load them.
    mine = map_objects(lambda tensor: tensor.detach().cpu(), tree)  # sync: evaluation only
    objects = mine if isinstance(mine, list) else [mine]
    return [each for rank in strategy.gather_objects(objects if counts else []) for each in rank]


def gather_rows(tensor: torch.Tensor, strategy: Collectives, count: int | None) -> torch.Tensor:
    """Join the rows of all ranks in the order of the data, without filler rows.

    Ranks may differ in rows, and in the second dimension, which is padded with -100. `count` is the rows of all ranks;
    None gathers the number.
    """
    world = strategy.world_size
    if world == 1:
        return tensor
    tensor = torch.atleast_1d(tensor)
    width = tensor.shape[1] if tensor.dim() > 1 else 0
    mine = torch.tensor([[tensor.shape[0], width]], device=strategy.device)
    shapes = strategy.gather(mine).cpu()  # sync: evaluation only
    (least, narrowest), (height, widest) = torch.stack(shapes.aminmax(dim=0)).tolist()
    if narrowest != widest and not tensor.dtype.is_signed:
        tensor = tensor.long()  # this type can hold the padding
    gathered = strategy.gather(_pad(tensor, height, widest))
    if least == height and (count is None or count >= world):
        return gathered  # of every batch but the last
    rows = shapes[:, 0].tolist()
    if count is not None:  # a rank with an empty share holds another rank's sample, only to take part
        rows = [n if rank * count // world < (rank + 1) * count // world else 0 for rank, n in enumerate(rows)]
    return torch.cat([gathered[rank * height : rank * height + number] for rank, number in enumerate(rows)])


def _pad(tensor: torch.Tensor, height: int, width: int) -> torch.Tensor:
    shape = [height, *tensor.shape[1:]]
    if tensor.dim() > 1:
        shape[1] = width
    if list(tensor.shape) == shape:
        return tensor.contiguous()
    # A type that cannot hold the padding has one width on all ranks: only rows that are removed again are padded.
    padded = tensor.new_full(shape, PADDING if tensor.dtype.is_signed else 0)
    corner = tuple(slice(0, size) for size in tensor.shape)
    padded[corner] = tensor
    return padded
