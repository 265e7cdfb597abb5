"""Turn a model's weights into another floating-point type, and say so in its configuration."""

from __future__ import annotations

import json
from typing import Any

import torch

from tr_ckpt.errors import CheckpointError

# What a configuration calls it; the second is the older name.
_NAMES = ("dtype", "torch_dtype")


def convert(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor in another dtype; one that has it is returned as it is.

    Raises:
        CheckpointError: a number is too large for `dtype`, and would become infinite.
    """
    converted = tensor.to(dtype)
    if not dtype.is_floating_point or tensor.dtype == dtype:
        return converted
    if bool((converted.isinf() & tensor.isfinite()).any()):
        largest = tensor[tensor.isfinite()].abs().max().item()
        raise CheckpointError(
            f"{name} holds {largest:.4g}, and the largest number of {_name(dtype)} is {torch.finfo(dtype).max:.4g}; "
            "give bfloat16, which reaches as far as float32"
        )
    return converted


def configured(raw: bytes, dtype: torch.dtype) -> bytes:
    """Return a `config.json` that names `dtype` wherever it names the dtype of the weights; otherwise it as it is.

    A reader that goes by the configuration would turn the weights back.
    """
    try:
        content = json.loads(raw)
    except (ValueError, RecursionError):
        return raw
    changed = _with_dtype(content, _name(dtype))
    return raw if changed == content else (json.dumps(changed, indent=2) + "\n").encode()


def _with_dtype(value: Any, name: str) -> Any:
    if not isinstance(value, dict):
        return value
    return {key: name if key in _NAMES and _is_float(item) else _with_dtype(item, name) for key, item in value.items()}


def _is_float(value: Any) -> bool:
    dtype = vars(torch).get(value) if isinstance(value, str) else None  # not getattr, which imports what it lacks
    return isinstance(dtype, torch.dtype) and dtype.is_floating_point


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
