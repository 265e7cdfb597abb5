"""Hold a module and the engine that trains it, which can be made only once there is an optimizer."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class EngineModel(nn.Module):
    """A module whose forward goes through DeepSpeed's engine, as soon as there is one.

    Until then the module computes alone, whole, on the device.

    Args:
        module: what is trained.
        device: where this rank computes.
        dtype: of the module under the engine; floating-point inputs are converted to it. None leaves them.

    Attributes:
        module: what is trained.
        given_groups: the parameters of each of the optimizer's groups, before the engine put its own in their place.
    """

    def __init__(self, module: nn.Module, device: torch.device, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.module = module
        self.given_groups: list[list[nn.Parameter]] = []
        self._device, self._dtype = device, dtype
        # In a list, for as an attribute the engine, which is a module, would be part of this one.
        self._engines: list[Any] = []
        self._collected: list[tuple[torch.Tensor, torch.Tensor]] = []

    @property
    def engine(self) -> Any:
        """DeepSpeed's engine, None before there is an optimizer."""
        return self._engines[0] if self._engines else None

    def take_engine(self, engine: Any, given_groups: list[list[nn.Parameter]]) -> None:
        """Compute through `engine` from now on."""
        self._engines, self.given_groups = [engine], given_groups
        flats = getattr(engine.optimizer, "single_partition_of_fp32_groups", ())
        self._collected = [(flat, flat.grad) for flat in flats if flat.grad is not None]

    def restore_buffers(self) -> None:
        """Put the gradients that ZeRO collects in host memory where it looks for them, if `zero_grad` took them off."""
        for flat, buffer in self._collected:
            flat.grad = buffer

    def drop_engine(self) -> None:
        """Take the engine's hooks off the module, which under ZeRO-3 stays divided until there is another engine."""
        if (engine := self.engine) is None:
            return
        self._engines, self._collected = [], []
        engine.module_forward_pre_hook.remove()
        engine.module_forward_post_hook.remove()
        engine.destroy()

    def forward(self, *inputs: Any, **options: Any) -> Any:
        """Call the module with its own arguments."""
        engine = self.engine
        if engine is None:
            return self.module.to(self._device)(*inputs, **options)
        if self._dtype is not None:
            inputs, options = _converted(inputs, self._dtype), _converted(options, self._dtype)
        return engine(*inputs, **options)


def _converted(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if type(value) in (list, tuple):
        return type(value)(_converted(item, dtype) for item in value)
    if type(value) is dict:
        return {key: _converted(item, dtype) for key, item in value.items()}
    return value
