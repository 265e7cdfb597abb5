"""Place a model on its device, keep it in training mode during a run, and save all of its state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import nn

from tr_core.protocols import HeldInShards, Stateful, Strategy


def model_part(strategy: Strategy, model: nn.Module, wrapped: nn.Module) -> Stateful:
    """Return the checkpoint part of the full model."""
    part = strategy.state_parts(wrapped, None)["model"]
    return WholeState(part, model) if _gives_another_state(model) else part


def state_held_here(part: Stateful) -> dict[str, Any]:
    """Return a model's state under all names on every rank, also where `state_dict` is empty on all ranks but one."""
    return part.state_held_here() if isinstance(part, HeldInShards) else part.state_dict()


class WholeState:
    """Save and restore all parameters and buffers of a model under their own names.

    Scripts replace a model's `state_dict` so that `save_pretrained` writes only an adapter. `load_state_dict` could not
    load what they omit or rename, so a checkpoint does not use the replaced method.
    """

    def __init__(self, part: Stateful, model: nn.Module) -> None:
        self._part, self._model = part, model

    def state_dict(self) -> dict[str, Any]:
        """Return the full state dict."""
        with _own_methods(self._model):
            return self._part.state_dict()

    def state_held_here(self) -> dict[str, Any]:
        """Return the state as far as this rank holds it."""
        with _own_methods(self._model):
            return state_held_here(self._part)

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Load a full state dict."""
        with _own_methods(self._model):
            self._part.load_state_dict(state_dict)


def _gives_another_state(model: nn.Module) -> bool:
    return "state_dict" in vars(model) or _class_gives_another(model)


def _class_gives_another(model: nn.Module) -> bool:
    """Whether a class changes the names in its state dict, but not how it is loaded."""
    kind = type(model)
    if kind.state_dict is nn.Module.state_dict or kind.load_state_dict is not nn.Module.load_state_dict:
        return False
    return set(kind.state_dict(model)) != set(nn.Module.state_dict(model))


@contextmanager
def _own_methods(model: nn.Module) -> Iterator[None]:
    held = vars(model)
    replaced = held.pop("state_dict", None)
    if _class_gives_another(model):
        held["state_dict"] = MethodType(nn.Module.state_dict, model)
    try:
        yield
    finally:
        held.pop("state_dict", None)
        if replaced is not None:
            held["state_dict"] = replaced


def is_left_in_place(model: nn.Module) -> bool:
    """Whether the loader placed the model for good: `device_map` of transformers, weights of bitsandbytes.

    If a map has several entries, hooks on the modules move inputs to the device of each.
    """
    places = getattr(model, "hf_device_map", None)
    is_divided = isinstance(places, Mapping) and len(places) > 1
    return is_divided or "disk" in _devices_of(places) or getattr(model, "quantization_method", None) == "bitsandbytes"


def place_on_device(model: nn.Module, device: torch.device) -> nn.Module:
    """Move a model to a device, unless it must stay in place.

    Raises:
        ValueError: the full model was loaded onto another accelerator.
    """
    if is_left_in_place(model):
        return model
    for where in map(torch.device, _devices_of(getattr(model, "hf_device_map", None))):
        if where.type != "cpu" and (where.type, where.index or 0) != (device.type, device.index or 0):
            raise ValueError(
                f"{type(model).__name__} was loaded onto {where} (hf_device_map), and training computes on {device}; "
                f"load it with device_map={{'': {str(device)!r}}} or without, or show this process that device alone, "
                "as with CUDA_VISIBLE_DEVICES"
            )
    return model.to(device)


def _devices_of(places: Any) -> list[Any]:
    return list(places.values()) if isinstance(places, Mapping) else []


class TrainingMode:
    """Control the mode of a model's modules during training.

    - A run sets the full model to training mode at its beginning. Norm layers with running statistics stay in
      evaluation mode if the module around them is in training mode: the user froze them.
    - Modules that a user sets to evaluation mode during the run stay in it, as long as the model itself is in training
      mode.
    - A callback may leave the full model in evaluation mode, as by `model.eval()` before generating text. The model
      returns to training mode before its next micro-batch. Modules stay in evaluation mode if they were in it when the
      run, or its last epoch, began.
    """

    def __init__(self, model: nn.Module, wrapped: nn.Module) -> None:
        self._model, self._wrapped = model, wrapped
        self._frozen: list[nn.Module] = []

    def begin(self) -> None:
        """Set the model to training mode, except frozen norm layers."""
        self._frozen = _frozen_norms(self._model)
        self.restore()

    def record(self) -> None:
        """Record which modules are in evaluation mode, unless the full model is."""
        if self._model.training:
            self._frozen = [module for module in self._model.modules() if not module.training]

    def restore(self) -> None:
        """Set the model back to training mode, except the modules that must stay in evaluation mode."""
        self._wrapped.train()
        self._model.train()
        for module in self._frozen:
            module.training = False


def _frozen_norms(model: nn.Module) -> list[nn.Module]:
    """Return the norm layers with running statistics that are in evaluation mode inside a module that is not."""
    return [
        child
        for module in model.modules()
        if module.training
        for child in module.children()
        if not child.training and hasattr(child, "running_mean")
    ]
