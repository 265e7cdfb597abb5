"""Divide a model and its batches over all devices of one process (SPMD): the compiler adds what they exchange."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

AXIS = "fsdp"


class OverDevices:
    """All XLA devices of a process as one, each with a part of every parameter and of every batch.

    The program is that of one device, and so are its numbers, up to rounding; a batch whose rows do not come out even
    is divided all the same.

    Args:
        runtime: the module `torch_xla.runtime`, of which nothing was asked for before.

    Attributes:
        count: number of devices.

    Raises:
        ValueError: the job has several processes.
    """

    def __init__(self, runtime: Any) -> None:
        runtime.use_spmd()
        if runtime.process_count() > 1:
            raise ValueError(
                f"xla_fsdp_v2=True divides the batches of one process, and this job has {runtime.process_count()}; "
                "use one machine"
            )
        import numpy as np

        self.count = int(runtime.global_runtime_device_count())
        self._spmd = importlib.import_module("torch_xla.distributed.spmd")
        self._specification = importlib.import_module("torch_xla")._XLAC._get_xla_sharding_spec
        self._mesh = self._spmd.Mesh(np.arange(self.count), (self.count,), (AXIS,))

    def divide(self, model: nn.Module, units: Sequence[nn.Module]) -> None:
        """Divide the parameters of a model that is on the device, and whatever it and its units will be given.

        Optimizer state is divided as the parameters are. A parameter of fewer rows and columns than there are devices
        stays whole.
        """
        for parameter in model.parameters():
            if parameter.dim() and max(parameter.shape) >= self.count:
                self._mark(parameter, parameter.shape.index(max(parameter.shape)))
        model.register_forward_pre_hook(self._divide_inputs, with_kwargs=True)
        for unit in units:
            unit.register_forward_hook(self._divide_outputs)

    def is_divided(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies on several devices in parts."""
        return "devices=" in self._specification(tensor)

    def _divide_inputs(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        for tensor in _tensors((args, kwargs)):
            self._by_rows(tensor)

    def _divide_outputs(self, module: nn.Module, args: Any, output: Any) -> None:
        # Else the compiler might rather gather activations than weights.
        for tensor in _tensors(output):
            if tensor.dim() > 1:
                self._by_rows(tensor)

    def _by_rows(self, tensor: torch.Tensor) -> None:
        if tensor.device.type == "xla" and tensor.dim() and tensor.shape[0] > 1 and not self._specification(tensor):
            self._mark(tensor, 0)

    def _mark(self, tensor: torch.Tensor, dimension: int) -> None:
        axes = [AXIS if number == dimension else None for number in range(tensor.dim())]
        self._spmd.mark_sharding(tensor, self._mesh, tuple(axes))


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, dict):
        for value in tree.values():
            yield from _tensors(value)
    elif isinstance(tree, list | tuple):
        for value in tree:
            yield from _tensors(value)
