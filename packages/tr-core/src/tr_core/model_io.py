"""Find the parameters of a model's forward, call it with them, and read the loss from what it returns."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import nn

from tr_core.signatures import parameters_of


def base_model(model: nn.Module) -> nn.Module:
    """Return the model inside an adapter wrapper (PEFT's), or the model itself: its forward has the real signature."""
    inner = getattr(model, "get_base_model", None)
    return cast("nn.Module", inner()) if callable(inner) else model


def forward_parameters(model: nn.Module) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of the forward of a model, or of the model inside an adapter wrapper."""
    return parameters_of(base_model(model).forward)


def find_label_names(model: nn.Module) -> list[str]:
    """Return the parameters of a model's forward that are labels: their names contain `label`.

    Question-answering models also take `start_positions` and `end_positions` as labels.
    """
    positions = ("start_positions", "end_positions") if "QuestionAnswering" in type(base_model(model)).__name__ else ()
    return [name for name in forward_parameters(model) if "label" in name or name in positions]


def can_return_loss(model: nn.Module) -> bool:
    """Whether a model returns a loss without labels: its forward has `return_loss=True`."""
    parameter = forward_parameters(model).get("return_loss")
    return parameter is not None and parameter.default is True


def main_input_name(model: nn.Module, processing_class: Any = None) -> str:
    """Return the name of the input that has the sample's length: the tokenizer's first, else the model's."""
    names = getattr(processing_class, "model_input_names", None)
    return names[0] if names else getattr(base_model(model), "main_input_name", "input_ids")


def kept_columns(model: nn.Module, label_names: list[str]) -> list[str] | None:
    """Return the keys of a sample that the model can use; None if it takes anything by `**kwargs` only."""
    names = [
        name
        for name, parameter in forward_parameters(model).items()
        if parameter.kind not in (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    ]
    return [*names, "label", "label_ids", *label_names] if names else None


def to_device(data: Any, device: torch.device, *, copy: bool = False) -> Any:
    """Move every tensor inside mappings, lists and tuples to a device, without waiting for the copy.

    A copy to the CPU is waited for: its values are read without asking the device. With `copy`, tensors that are there
    already are copied too.
    """
    goes_on = device.type != "cpu"
    if isinstance(data, torch.Tensor):
        return data.to(device, non_blocking=goes_on, copy=copy)
    if isinstance(data, Mapping):
        moved: dict[Any, Any] = {}
        for key, value in data.items():
            if isinstance(value, torch.Tensor):  # here too: it saves a call for each tensor of a batch
                moved[key] = value.to(device, non_blocking=goes_on, copy=copy)
            else:
                moved[key] = to_device(value, device, copy=copy)
        return moved if type(data) is dict else _rebuild(data, moved)
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*(to_device(value, device, copy=copy) for value in data))
    if isinstance(data, list | tuple):
        return type(data)(to_device(value, device, copy=copy) for value in data)
    if dataclasses.is_dataclass(data) and not isinstance(data, type):
        names = [f.name for f in dataclasses.fields(data) if f.init]
        return dataclasses.replace(data, **{name: to_device(getattr(data, name), device, copy=copy) for name in names})
    return data


def map_items(function: Callable[[Any], Any], data: Any) -> Any:
    """Call a function on each value of a mapping, list or tuple, and return one like it."""
    if isinstance(data, Mapping):
        return _rebuild(data, {name: function(value) for name, value in data.items()})
    items = [function(value) for value in data]
    return type(data)(*items) if hasattr(data, "_fields") else type(data)(items)


def _rebuild(original: Mapping[str, Any], moved: dict[str, Any]) -> Any:
    try:
        return type(original)(moved)  # type: ignore[call-arg]
    except TypeError:  # a mapping class that takes no mapping
        return moved


def local_shard(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of a tensor that this rank holds: of a DTensor its shard, else the tensor."""
    to_local: Any = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()


def to_plain(tree: Any, other: Callable[[Any], Any] = lambda value: value) -> Any:
    """Convert tensors and arrays inside mappings, lists and tuples to numbers and lists. Sync on a device."""
    if isinstance(tree, Mapping):
        return {key: to_plain(value, other) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [to_plain(value, other) for value in tree]
    if hasattr(tree, "tolist"):
        return tree.tolist()
    return tree if tree is None or isinstance(tree, bool | int | float | str) else other(tree)


def batch_size_of(inputs: Any) -> int | None:
    """Return the size of the first dimension of the first tensor found; None if there is none."""
    if isinstance(inputs, torch.Tensor):
        return inputs.shape[0] if inputs.dim() > 0 else None
    values = inputs.values() if isinstance(inputs, Mapping) else inputs if isinstance(inputs, list | tuple) else ()
    return next((size for size in map(batch_size_of, values) if size is not None), None)


def rows_of(batch: Any, start: int, stop: int) -> Any:
    """Return some rows of every tensor and list in a batch that has as many rows as the first tensor."""
    size = batch_size_of(batch)

    def cut(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: cut(item) for key, item in value.items()}
        if isinstance(value, list | tuple) and any(hasattr(item, "shape") for item in value):
            return type(value)(map(cut, value))
        has_rows = isinstance(value, list) or getattr(value, "shape", ()) != ()
        return value[start:stop] if has_rows and len(value) == size else value

    return cut(batch)


def loss_of(outputs: Any, inputs: Any) -> torch.Tensor:
    """Return the loss in a model's outputs: `loss` of a dict or object, else the first item of a tuple.

    Raises:
        ValueError: there is no loss; the message names the model's outputs and inputs.
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


IGNORED_TARGET = -100


def accepts_count(model: nn.Module) -> bool:
    """Whether a model's forward accepts `num_items_in_batch`.

    `accepts_loss_kwargs` of its class has priority. Otherwise the forward must name the parameter, or take `**kwargs`
    in a model with a `loss_function` to pass it to. Any other `**kwargs` may refuse or ignore it.
    """
    declared = getattr(model, "accepts_loss_kwargs", None)
    if declared is not None:
        return bool(declared)
    parameters = parameters_of(model.forward)
    if "num_items_in_batch" in parameters:
        return True
    has_kwargs = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    return has_kwargs and ignores_targets(model)


def ignores_targets(model: nn.Module) -> bool:
    """Whether a model leaves labels of -100 out of its loss: all with a `loss_function`, those of transformers, do."""
    return "loss_function" in dir(type(model))
