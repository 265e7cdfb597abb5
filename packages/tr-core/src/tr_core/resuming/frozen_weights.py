"""Tell whether the weights under an adapter, which its checkpoints do not hold, are those that it was trained on."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from tr_core.adapters import is_adapter

# Bytes that are looked at together, a multiple of 8: what is made of them takes three times as much, and on a CPU stays
# in its cache.
_CHUNK_BYTES = {"cpu": 1 << 20}
_CHUNK_BYTES_ELSEWHERE = 1 << 26
# Constants of splitmix64, as signed numbers.
# Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", figure 16.
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_MIXING = ((30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64))


def fingerprint(
    model: nn.Module, gathered: Callable[[torch.Tensor], AbstractContextManager[torch.Tensor]] = nullcontext
) -> dict[str, Any] | None:
    """Return what tells the frozen weights of a model with an adapter from others; None for any other model.

    Every byte counts. Weights are summed where they lie, so this takes one pass over them and one read.

    Args:
        model: with or without an adapter.
        gathered: gives one parameter whole, for as long as its block lasts; collective where ranks have shards.
    """
    if not is_adapter(model):
        return None
    frozen = {name: parameter for name, parameter in model.named_parameters() if not parameter.requires_grad}
    digest = hashlib.sha256()
    shapes, sums = [], []
    for parameter in frozen.values():
        with gathered(parameter) as whole:
            shapes.append(whole.shape)
            sums.append(_sum(whole.detach()))
    for (name, parameter), shape, value in zip(frozen.items(), shapes, sums, strict=True):
        # Where an adapter sits, the module is one level down: which adapter it is, is told elsewhere.
        name = name.replace(".base_layer.", ".").replace(".original_module.", ".")
        # sync: once a run, and not in a step
        digest.update(f"{name} {parameter.dtype} {tuple(shape)} {value.tolist()}\n".encode())
    count = sum(shape.numel() for shape in shapes)
    kinds = sorted({str(parameter.dtype).removeprefix("torch.") for parameter in frozen.values()})
    return {"digest": digest.hexdigest(), "weights": count, "dtypes": kinds}


def check_frozen(then: Mapping[str, Any] | None, now: Mapping[str, Any] | None) -> None:
    """Raise where an adapter would go on upon other weights than those that it was trained on.

    Raises:
        ValueError: the message says what is known of the difference.
    """
    if then is None or now is None or then["digest"] == now["digest"]:
        return
    figures = [f"{side['weights']:,} of {', '.join(side['dtypes'])}" for side in (then, now)]
    what = f"{figures[0]} then, {figures[1]} now" if figures[0] != figures[1] else f"{figures[0]}, with other values"
    raise ValueError(
        f"the frozen weights under the adapter are not those that it was trained on ({what}), and the checkpoint does "
        "not hold them; give the base model, its revision and its dtype of then, with the same layers frozen"
    )


def _sum(tensor: torch.Tensor) -> torch.Tensor:
    """Return a sum of a tensor's bits, each 8 bytes mixed with their place: one 64-bit number where it lies.

    Mixed, because weights that all change by as much, or blocks that change places, cancel in a plain weighted sum.
    """
    if tensor.device.type not in ("cpu", "cuda"):  # others lack views of 64-bit integers
        tensor = tensor.cpu()
    data = tensor.contiguous().reshape(-1).view(torch.uint8)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    start = 0
    for chunk in data.split(_CHUNK_BYTES.get(tensor.device.type, _CHUNK_BYTES_ELSEWHERE)):
        words = torch.cat([chunk, chunk.new_zeros(-len(chunk) % 8)]).view(torch.int64)
        words += torch.arange(start, start + len(words), device=tensor.device).mul_(_GOLDEN)
        for shift, factor in _MIXING:
            words ^= words >> shift
            words *= factor
        total += words.sum()
        start += len(words)
    return total
