"""Train on the GPU of a Mac, through torch's `mps` device.

The check that there is only one process is duplicated in `tr_core/single_device.py`: neither package imports the
other.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn

from tr_dist.base import OnDevice, check_trainable, precision_of, some_of
from tr_dist.environment import read_environment

_DEVICE = torch.device("mps")
_WIDE = (torch.float64, torch.complex128)
_ADVICE = (
    "the mps device has not this operation; start the program with PYTORCH_ENABLE_MPS_FALLBACK=1 in its environment to "
    "compute it on the CPU, slowly (torch reads that when it is imported: in the script it comes too late), or set "
    "use_cpu=True"
)


class MPS(OnDevice):
    """Train in one process on the one GPU of a Mac.

    Neither gloo nor nccl supports tensors of this device, so there is one process, and no process group. The calls are
    those of `tr_dist.DDP`: a loop that is written for one runs with the other.

    - A model with 64-bit numbers is refused: the device does not support them.
    - The host decides whether to skip an update: in some versions of torch the fused optimizers of this
      device apply an update that should be skipped.
    - An operation that the device does not support raises an error that says how to compute it on the CPU.

    Args:
        precision: `no`, `bf16` (from macOS 14), or `fp16` with loss scaling (from torch 2.8).

    Attributes:
        device: `mps`.
        rank: 0.
        local_rank: 0.
        world_size: 1.

    Raises:
        ValueError: there is no such device, it does not support the precision, or a launcher started several
            processes.
    """

    def __init__(self, *, precision: str = "no") -> None:
        _check_alone()
        _check_available()
        _check_precision(precision)
        super().__init__(_DEVICE, precision=precision)
        self._parameters: list[torch.Tensor] = []

    @classmethod
    def from_arguments(cls, args: Any) -> MPS:
        """Build from training arguments: `bf16` and `fp16`.

        Raises:
            ValueError: `use_cpu` contradicts it, or the constructor raises.
        """
        if args.use_cpu:
            raise ValueError("strategy='mps' and use_cpu=True contradict each other; leave one of them out")
        return cls(precision=precision_of(args))

    def prepare(self, model: nn.Module) -> nn.Module:
        """Move the model to the device.

        Raises:
            ValueError: it has no trainable parameter, is wrapped, has no values yet, or has 64-bit numbers.
        """
        check_trainable(model, torch.device(self.device.type, 0))  # the form of the device that tensors report
        _check_narrow(model)
        model = model.to(self.device)
        self._parameters = list(model.parameters())  # once: walking the modules every step costs more than the norm
        return model

    def accumulate(self, model: nn.Module, *, sync: bool) -> AbstractContextManager[object]:
        """Return the context for forward and backward of one micro-batch; it explains unsupported operations."""
        return _advising()

    @contextmanager
    def autocast(self) -> Iterator[None]:
        """Return the context for a forward pass and its loss: autocast, if mixed precision is on."""
        with _advising(), super().autocast():
            yield

    def clip_grad_norm(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, max_norm: float | None
    ) -> torch.Tensor:
        """Scale the gradients so that their total 2-norm is at most `max_norm`; None measures without scaling.

        Returns:
            The norm before clipping, a scalar tensor on the device; no sync.
        """
        return self._clip(self._parameters, optimizer, max_norm)

    def step(self, optimizer: torch.optim.Optimizer, *, skip: torch.Tensor | None = None) -> bool:
        """Apply the gradients. Returns False if a float16 overflow skipped the step, otherwise True.

        Args:
            optimizer: the optimizer to step.
            skip: scalar on the device; it is read. If it is not 0, parameters and optimizer state stay
                unchanged.
        """
        if skip is None and self._precision.scaler is None:
            return super().step(optimizer)
        with _deciding_on_host(optimizer):
            return super().step(optimizer, skip=skip)


def _check_alone() -> None:
    if (size := read_environment().world_size) > 1:
        raise ValueError(
            f"strategy='mps' in one of {size} processes (WORLD_SIZE): neither gloo nor nccl carries tensors of the mps "
            "device, and a Mac has one; start one process, or set use_cpu=True and strategy='ddp' for several"
        )


def _check_available() -> None:
    if torch.backends.mps.is_available():
        return
    reason = "macOS is older than 14, or its GPU is not Apple's"
    if not torch.backends.mps.is_built():
        reason = f"torch {torch.__version__} is built without it, as it is everywhere but on a Mac"
    raise ValueError(f"strategy='mps' needs a Mac's GPU, and torch has none: {reason}; set strategy='auto'")


def _check_precision(precision: str) -> None:
    if precision == "bf16" and not torch.backends.mps.is_macos_or_newer(14, 0):
        raise ValueError("bf16=True on the mps device needs macOS 14; use fp16=True, or update macOS")
    if precision == "fp16" and tuple(int(n) for n in torch.__version__.split(".")[:2]) < (2, 8):
        raise ValueError(
            f"fp16=True on the mps device needs torch 2.8: loss scaling of torch {torch.__version__} computes in 64 "
            "bits, which the device has not; use bf16=True, or update torch"
        )


def _check_narrow(model: nn.Module) -> None:
    tensors = [*model.named_parameters(), *model.named_buffers()]
    wide = [f"{name} ({tensor.dtype})" for name, tensor in tensors if tensor.dtype in _WIDE]
    if wide:
        raise ValueError(
            f"{len(wide)} tensors of {type(model).__name__} are 64 bits wide, which the mps device cannot compute with"
            f": {some_of(wide)}; use model.float(), or use_cpu=True"
        )


@contextmanager
def _advising() -> Iterator[None]:
    """Add to the error of an unsupported operation how to compute it elsewhere."""
    try:
        yield
    except NotImplementedError as error:
        if "MPS device" in str(error) and _ADVICE not in getattr(error, "__notes__", ()):
            error.add_note(_ADVICE)
        raise


@contextmanager
def _deciding_on_host(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Make `step_unless` decide on the host for this optimizer."""
    name = "_step_supports_amp_scaling"
    given = vars(optimizer).get(name)
    if not given:
        yield
        return
    setattr(optimizer, name, False)
    try:
        yield
    finally:
        setattr(optimizer, name, given)
