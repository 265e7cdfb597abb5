"""Find out what a model's forward takes, give it that, and find the loss in what it gives."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import nn


def base_model(model: nn.Module) -> nn.Module:
    """Return the model inside an adapter wrapper (PEFT's), or the model itself: the one whose forward tells."""
    inner = getattr(model, "get_base_model", None)
    return cast("nn.Module", inner()) if callable(inner) else model


def forward_parameters(model: nn.Module) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of the forward of a model, or of the model inside an adapter wrapper."""
    return inspect.signature(base_model(model).forward).parameters


def find_label_names(model: nn.Module) -> list[str]:
    """Return the parameters of a model's forward that are labels: their names contain `label`.

    Question-answering models also take `start_positions` and `end_positions` as labels.
    """
    positions = ("start_positions", "end_positions") if "QuestionAnswering" in type(base_model(model)).__name__ else ()
    return [name for name in forward_parameters(model) if "label" in name or name in positions]


def can_return_loss(model: nn.Module) -> bool:
    """Whether a model gives a loss without labels: its forward has `return_loss=True`."""
    parameter = forward_parameters(model).get("return_loss")
    return parameter is not None and parameter.default is True


def main_input_name(model: nn.Module, processing_class: Any = None) -> str:
    """Return the name of the input that tells how long a sample is: the tokenizer's first, else the model's."""
    names = getattr(processing_class, "model_input_names", None)
    return names[0] if names else getattr(base_model(model), "main_input_name", "input_ids")


def kept_columns(model: nn.Module, label_names: list[str]) -> list[str] | None:
    """Return the keys of a sample that the model can use; None if it takes anything by `**kwargs` alone."""
    names = [
        name
        for name, parameter in forward_parameters(model).items()
        if parameter.kind not in (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    ]
    return [*names, "label", "label_ids", *label_names] if names else None


def to_device(data: Any, device: torch.device) -> Any:
    """Move every tensor inside mappings, lists and tuples to a device, without waiting for the copy."""
    if isinstance(data, torch.Tensor):
        return data.to(device, non_blocking=True)
    if isinstance(data, Mapping):
        moved: dict[Any, Any] = {}
        for key, value in data.items():
            is_tensor = isinstance(value, torch.Tensor)
            moved[key] = value.to(device, non_blocking=True) if is_tensor else to_device(value, device)
        return moved if type(data) is dict else _rebuild(data, moved)
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*(to_device(value, device) for value in data))
    if isinstance(data, list | tuple):
        return type(data)(to_device(value, device) for value in data)
    if dataclasses.is_dataclass(data) and not isinstance(data, type):
        names = [f.name for f in dataclasses.fields(data) if f.init]
        return dataclasses.replace(data, **{name: to_device(getattr(data, name), device) for name in names})
    return data


def _rebuild(original: Mapping[str, Any], moved: dict[str, Any]) -> Any:
    try:
        return type(original)(moved)  # type: ignore[call-arg]
    except TypeError:  # a mapping that cannot be made from one
        return moved


def batch_size_of(inputs: Any) -> int | None:
    """Return the size of the first dimension of the first tensor found; None if there is none."""
    if isinstance(inputs, torch.Tensor):
        return inputs.shape[0] if inputs.dim() > 0 else None
    values = inputs.values() if isinstance(inputs, Mapping) else inputs if isinstance(inputs, list | tuple) else ()
    return next((size for size in map(batch_size_of, values) if size is not None), None)


def loss_of(outputs: Any, inputs: Any) -> torch.Tensor:
    """Return the loss that a model's outputs hold: `loss` of a dict or object, else the first of a tuple.

    Raises:
        ValueError: there is none; the message names what the model gave and got.
    """
    if isinstance(outputs, dict):
        loss = outputs.get("loss")
        given = list(outputs)
    elif isinstance(outputs, tuple | list):
        loss = outputs[0] if outputs else None
        given = [type(item).__name__ for item in outputs]
    elif isinstance(outputs, torch.Tensor):
        loss, given = (outputs if outputs.dim() == 0 else None), [f"a tensor of shape {tuple(outputs.shape)}"]
    else:
        loss, given = (
            getattr(outputs, "loss", None),
            sorted(vars(outputs)) if hasattr(outputs, "__dict__") else [],
        )
    if not isinstance(loss, torch.Tensor):
        received = sorted(inputs) if isinstance(inputs, dict) else type(inputs).__name__
        raise ValueError(
            f"{type(outputs).__name__} returned by the model holds no loss, only {given}; the model was given "
            f"{received}. Give it labels (see label_names), pass compute_loss_func, or override compute_loss"
        )
    return loss
