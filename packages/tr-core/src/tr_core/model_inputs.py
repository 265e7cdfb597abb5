"""Find out what a model's forward takes, and give it that."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from tr_core.fetch import Collate


def base_model(model: nn.Module) -> nn.Module:
    """Return the model inside an adapter wrapper (PEFT's), or the model itself: the one whose forward tells."""
    inner = getattr(model, "get_base_model", None)
    return inner() if callable(inner) else model


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


def kept_columns(model: nn.Module, label_names: list[str]) -> list[str] | None:
    """Return the keys of a sample that the model can use; None if it takes anything by `**kwargs` alone."""
    names = [
        name
        for name, parameter in forward_parameters(model).items()
        if parameter.kind not in (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    ]
    return [*names, "label", "label_ids", *label_names] if names else None


class KeepColumns:
    """A collator that first drops what the model does not take from samples that are mappings.

    Args:
        collate: the collator that gets what is left.
        columns: keys to keep.
        model_name: class name of the model, for messages.

    Raises:
        ValueError: when called, if nothing is left, or if the collator misses a dropped key; the message names it.
    """

    def __init__(self, collate: Collate, columns: list[str], model_name: str) -> None:
        self._collate, self._columns, self._model_name = collate, frozenset(columns), model_name

    def __call__(self, samples: list[Any]) -> Any:
        """Collate the samples without the keys that the model does not take."""
        if not isinstance(samples[0], Mapping):
            return self._collate(samples)
        columns = self._columns
        kept = [{key: value for key, value in sample.items() if key in columns} for sample in samples]
        if not kept[0]:
            raise ValueError(self._explain(samples[0], "no column is left"))
        try:
            return self._collate(kept)
        except KeyError as error:
            if error.args and error.args[0] in set(samples[0]) - columns:
                raise ValueError(self._explain(samples[0], f"the data collator asks for {error.args[0]!r}")) from error
            raise

    def _explain(self, sample: Mapping[str, Any], problem: str) -> str:
        dropped = sorted(set(sample) - self._columns)
        return (
            f"{problem} after dropping {dropped}, which the forward of {self._model_name} does not take (it takes "
            f"{sorted(self._columns)}); pass remove_unused_columns=False to keep all columns"
        )


def to_device(data: Any, device: torch.device) -> Any:
    """Move every tensor inside mappings, lists and tuples to a device, without waiting for the copy."""
    if isinstance(data, torch.Tensor):
        return data.to(device, non_blocking=True)
    if type(data) is dict:
        return {key: to_device(value, device) for key, value in data.items()}
    if isinstance(data, Mapping):
        return _rebuild(data, {key: to_device(value, device) for key, value in data.items()})
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*(to_device(value, device) for value in data))
    if isinstance(data, list | tuple):
        return type(data)(to_device(value, device) for value in data)
    if dataclasses.is_dataclass(data) and not isinstance(data, type):
        moved = {f.name: to_device(getattr(data, f.name), device) for f in dataclasses.fields(data) if f.init}
        return dataclasses.replace(data, **moved)
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
