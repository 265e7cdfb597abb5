"""Move a model to the device that computes, or leave it where whoever loaded it has put it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn


def is_left_in_place(model: nn.Module) -> bool:
    """Whether a model's parts were put where they are to be: `device_map` of transformers, weights of bitsandbytes.

    Where a map has several entries, hooks on the modules bring inputs to the device of each.
    """
    places = getattr(model, "hf_device_map", None)
    is_divided = isinstance(places, Mapping) and len(places) > 1
    return is_divided or "disk" in _values(places) or getattr(model, "quantization_method", None) == "bitsandbytes"


def place(model: nn.Module, device: torch.device) -> nn.Module:
    """Move a model to a device, unless it is to be left where it is.

    Raises:
        ValueError: all of it was loaded onto another accelerator.
    """
    if is_left_in_place(model):
        return model
    for where in map(torch.device, _values(getattr(model, "hf_device_map", None))):
        if where.type != "cpu" and (where.type, where.index or 0) != (device.type, device.index or 0):
            raise ValueError(
                f"{type(model).__name__} was loaded onto {where} (hf_device_map), and training computes on {device}; "
                f"load it with device_map={{'': {str(device)!r}}} or without, or show this process that device alone, "
                "as with CUDA_VISIBLE_DEVICES"
            )
    return model.to(device)


def _values(places: Any) -> list[Any]:
    return list(places.values()) if isinstance(places, Mapping) else []
