"""Compute in a lower precision where that is safe, with loss scaling for float16."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from tr_dist.skipping import step_unless


class MixedPrecision:
    """Autocast, scaled backward and scaled step of one precision on one device.

    Args:
        precision: `no`, `bf16`, or `fp16`, which scales the loss so that small gradients do not vanish.
        device: where the model is.

    Attributes:
        dtype: what operations that are safe in it are computed in; None for the parameters' own.
        scaler: the loss scaler of `fp16`, whose state belongs in a checkpoint; else None.

    Raises:
        ValueError: the precision is not known, or the device does not have it.
    """

    def __init__(self, precision: str, device: torch.device) -> None:
        if precision not in _DTYPES:
            raise ValueError(f"precision={precision!r} is not known; choose no, bf16 or fp16")
        if precision == "fp16" and device.type == "cpu":
            raise ValueError(
                "precision='fp16' needs an accelerator: its range needs scaled losses, which pay off only "
                "where float16 is fast; on the CPU use precision='bf16' (--bf16) or 'no'"
            )
        if precision == "bf16" and device.type == "cuda" and not torch.cuda.is_bf16_supported():
            raise ValueError(
                f"precision='bf16' needs a device with bfloat16; {torch.cuda.get_device_name(device)} has "
                "none: use precision='fp16' (--fp16)"
            )
        self._device_type = device.type
        self.dtype = _DTYPES[precision]
        self.scaler = torch.amp.GradScaler(device.type) if precision == "fp16" else None

    def autocast(self) -> AbstractContextManager[object]:
        """Surround a forward pass and its loss."""
        if self.dtype is None:
            return nullcontext()
        return torch.autocast(self._device_type, dtype=self.dtype)

    def backward(self, loss: torch.Tensor) -> None:
        """Compute the gradients of a scalar loss, multiplied by the scale under float16."""
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients by the scale, at most once a step; `step` then does not do it again."""
        if self.scaler is not None:
            self.scaler.unscale_(optimizer)

    def step(self, optimizer: torch.optim.Optimizer, *, skip: torch.Tensor | None = None) -> bool:
        """Apply the gradients, unless the scalar `skip` is set on the device.

        Returns False where float16 overflowed and the step was left out, else True.
        """
        if self.scaler is None:
            if skip is None:
                optimizer.step()
            else:
                step_unless(skip, optimizer)
            return True
        before = self.scaler.get_scale()  # sync
        if skip is None or not skip.item():  # sync
            self.scaler.step(optimizer)  # sync: float16 must know on the host whether a gradient overflowed
        self.scaler.update()
        return self.scaler.get_scale() >= before  # sync; the scale falls exactly when a step was left out


_DTYPES = {"no": None, "bf16": torch.bfloat16, "fp16": torch.float16}
