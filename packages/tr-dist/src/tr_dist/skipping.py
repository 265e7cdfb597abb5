"""Leave out an optimizer's update by a flag that is on the device.

`tr_core/optimization/skipping.py` is the same on purpose: neither package imports the other, and the flag has to go
through `Strategy.step`, for under float16 a strategy updates its scaler also where it leaves out the update.
"""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

import torch


def skips_on_device(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer leaves out an update by a flag on the device: torch's fused ones, by `found_inf`.

    Not with momentum in SGD: of the first update, even one it leaves out, it keeps uninitialised memory for the buffer.
    Not on the mps device, where versions of torch apply what is to be left out.
    """
    if not getattr(optimizer, "_step_supports_amp_scaling", False) or _takes_scaler(type(optimizer)):
        return False
    groups = optimizer.param_groups
    return not any(group.get("momentum") or any(p.is_mps for p in group["params"][:1]) for group in groups)


def step_unless(skip: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
    """Apply an update unless a flag is set; parameters and state then stay as they are, bit for bit.

    Args:
        skip: scalar on the device. It is read only where the optimizer cannot do that (see `skips_on_device`).
        optimizer: whose `step` is called.
    """
    if skips_on_device(optimizer):
        vars(optimizer).update(grad_scale=None, found_inf=skip.to(torch.float32))
        try:
            optimizer.step()
        finally:
            del vars(optimizer)["grad_scale"], vars(optimizer)["found_inf"]
    elif not skip.item():  # sync: every step, with an optimizer that cannot leave out an update by itself
        optimizer.step()


@cache
def _takes_scaler(kind: type[Any]) -> bool:
    # An older protocol, in which an optimizer asks the scaler itself.
    return "grad_scaler" in inspect.signature(kind.step).parameters
