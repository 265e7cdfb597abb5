"""Train on one device: the CPU, a CUDA or XPU device, or a Mac's MPS."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import MethodType
from typing import Any

import torch
from torch import nn

from tr_args import TrainingArguments
from tr_core.model import place_on_device
from tr_core.model_io import to_device
from tr_core.optim.nonfinite import step_unless
from tr_core.protocols import Stateful, Strategy
from tr_log import get_logger, warning_once

logger = get_logger(__name__)


def choose_device(use_cpu: bool = False) -> torch.device:
    """Return the device to compute on: torch's current accelerator, or the CPU if there is none or `use_cpu` is set."""
    if use_cpu:
        return torch.device("cpu")
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None:
        return torch.device("cpu")
    if accelerator.type == "mps":
        return torch.device("mps")
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


def warn_of_idle_devices(device: torch.device) -> None:
    """Warn once that one process uses one device, if there are more of its kind."""
    count = torch.accelerator.device_count() if device.type != "cpu" else 1
    if count > 1:
        warning_once(
            logger,
            "%d %s devices are visible, and one process uses one, %s; to use all, start a process for each: trainer "
            "launch --nproc %d SCRIPT, or torchrun --nproc-per-node %d SCRIPT (CUDA_VISIBLE_DEVICES chooses one)",
            count, device.type, device, count, count,
        )  # fmt: skip


class StrategyDefaults:
    """Provide default methods for a strategy without shards, and without exchange in a backward pass.

    A user's strategy may omit these methods; see `complete_strategy`.
    """

    accumulate: Callable[..., AbstractContextManager[object]]
    acts_on: frozenset[str] = frozenset()
    accelerator: Any = None
    sizes: Mapping[str, int] = {}
    coordinates: Mapping[str, int] = {}
    binds_optimizer = False
    members: Any = None
    schedules_micro_batches = False

    @property
    def data(self) -> Any:
        """Return the strategy: each process has samples of its own."""
        return self

    def check_model(self, model: nn.Module) -> None:
        """Do nothing: `prepare` refuses no model for its form."""

    def bind_optimizer(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Do nothing: the optimizer holds the model's own parameters."""

    def accumulate_fused(self, model: nn.Module, *, last: bool) -> AbstractContextManager[object]:
        """Return the same block as for a micro-batch without an exchange of gradients after it."""
        return self.accumulate(model, sync=False)

    def run_micro_batches(
        self,
        model: nn.Module,
        batches: Iterable[Any],
        compute: Callable[[Any], tuple[Any, torch.Tensor]],
        inputs_of: Any,
        size: int,
    ) -> Iterator[tuple[Any, torch.Tensor]]:
        """Return each micro-batch of a step with its loss, computed when it is its turn."""
        return map(compute, batches)

    def exchange_s(self, model: nn.Module) -> float | None:
        """Return None: where gradients are exchanged, the time that it takes is not known."""
        return None

    def window_metrics(self) -> dict[str, torch.Tensor]:
        """Return nothing: it measures nothing for the log."""
        return {}

    def gathered(self, parameter: torch.Tensor) -> AbstractContextManager[torch.Tensor]:
        """Return the parameter unchanged: every rank has the full one."""
        return nullcontext(parameter)

    def watching(self, progress: Callable[[], tuple[int, str, int]], folder: str) -> AbstractContextManager[object]:
        """Do nothing: nobody watches for ranks that hang."""
        return nullcontext()


_ATTRIBUTES = ("acts_on", "accelerator", "sizes", "coordinates", "members", "schedules_micro_batches")


def complete_strategy(strategy: Any) -> Strategy:
    """Add the methods of `StrategyDefaults` that a strategy lacks, and return the same object.

    Raises:
        TypeError: attributes cannot be added to the object.
    """
    optional = (
        "check_model",
        "bind_optimizer",
        "accumulate_fused",
        "run_micro_batches",
        "exchange_s",
        "window_metrics",
        "gathered",
        "watching",
    )
    methods = [name for name in optional if not hasattr(strategy, name)]
    try:
        for name in _ATTRIBUTES:
            if not hasattr(strategy, name):
                setattr(strategy, name, getattr(StrategyDefaults, name))
        if not hasattr(strategy, "data"):
            strategy.data = strategy
        if not hasattr(strategy, "binds_optimizer"):
            strategy.binds_optimizer = "bind_optimizer" not in methods
        for name in methods:
            setattr(strategy, name, MethodType(getattr(StrategyDefaults, name), strategy))
    except AttributeError:
        optional_attributes = [*_ATTRIBUTES, "data", "binds_optimizer"]
        lacking = ", ".join([*optional_attributes, *methods])
        raise TypeError(
            f"the strategy {type(strategy).__name__} lacks {lacking}, and no attribute can be added to it; define "
            "them, as tr_core.SingleDevice does"
        ) from None
    return strategy


class SingleDevice(StrategyDefaults):
    """Train with one process on one device, with automatic mixed precision.

    Args:
        device: where to compute; None selects one (see `choose_device`).
        precision: `no`, `bf16`, or `fp16` with loss scaling.
        use_cpu: select the CPU even if there is an accelerator.
        moves_model: whether `prepare` moves the model to the device.

    Raises:
        ValueError: the device cannot compute in the precision.
    """

    rank = 0
    local_rank = 0
    world_size = 1

    forward_is_collective = False

    def __init__(
        self,
        device: torch.device | str | None = None,
        *,
        precision: str = "no",
        use_cpu: bool = False,
        moves_model: bool = True,
    ) -> None:
        self._moves_model = moves_model
        self.device = torch.device(device) if device is not None else choose_device(use_cpu)
        if precision not in ("no", "bf16", "fp16"):
            raise ValueError(f"precision={precision!r} is not known; choose no, bf16 or fp16")
        if precision == "fp16" and self.device.type == "cpu":
            raise ValueError(
                "fp16=True cannot train on a CPU: its kernels have no float16 accumulation; use bf16=True or float32"
            )
        if precision == "fp16" and self.device.type == "mps":
            raise ValueError(
                "fp16=True on the mps device needs the strategy that is made for it: pip install tr-dist, which "
                "strategy='auto' then takes; or use bf16=True or float32"
            )
        if precision == "bf16" and self.device.type == "mps" and not torch.backends.mps.is_macos_or_newer(14, 0):
            raise ValueError("bf16=True on the mps device needs macOS 14; use float32, or update macOS")
        if precision == "bf16" and self.device.type == "cuda" and not torch.cuda.is_bf16_supported():
            raise ValueError(
                f"bf16=True needs a device with bfloat16, which {torch.cuda.get_device_name(self.device)} has not; "
                "use fp16=True"
            )
        self._dtype = {"no": None, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
        self._scaler = torch.amp.GradScaler(self.device.type) if precision == "fp16" else None
        self._nothing = nullcontext()
        self._parameters: list[torch.Tensor] = []
        self._are_of_one_kind = False

    @classmethod
    def from_arguments(cls, args: TrainingArguments) -> SingleDevice:
        """Build one from training arguments: `use_cpu`, `bf16`, `fp16` and the property `place_model_on_device`."""
        precision = "bf16" if args.bf16 else "fp16" if args.fp16 else "no"
        device = choose_device(args.use_cpu)
        warn_of_idle_devices(device)
        return cls(device, precision=precision, moves_model=getattr(args, "place_model_on_device", True) is not False)

    def prepare(self, model: nn.Module) -> nn.Module:
        """Move the model to the device, unless its loader placed it for good."""
        if self._moves_model:
            model = place_on_device(model, self.device)
        self._parameters = list(model.parameters())  # once: a walk over the modules costs more than the norm
        self._are_of_one_kind = are_of_one_kind(self._parameters)
        return model

    def unwrap(self, model: nn.Module) -> nn.Module:
        """Return the model unchanged."""
        return model

    def accumulate(self, model: nn.Module, *, sync: bool) -> AbstractContextManager[object]:
        """Do nothing: one process needs no synchronisation."""
        return self._nothing

    def autocast(self) -> AbstractContextManager[object]:
        """Compute in the lower precision where that is safe, if one was requested."""
        if self._dtype is None:
            return self._nothing
        return torch.autocast(self.device.type, dtype=self._dtype)

    def backward(self, loss: torch.Tensor) -> None:
        """Compute gradients; with fp16, of a scaled loss."""
        (loss if self._scaler is None else self._scaler.scale(loss)).backward()

    def clip_grad_norm(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, max_norm: float | None
    ) -> torch.Tensor:
        """Compute the gradients' norm on the device, and clip them to `max_norm` unless that is None."""
        if self._scaler is not None:
            self._scaler.unscale_(optimizer)
        gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        if not gradients:
            return torch.zeros((), device=self.device)  # torch's own functions return one on the CPU
        if self._are_of_one_kind:
            # The result of torch's functions, to the bit. They sort the gradients by device and type, twice, which
            # takes longer than the arithmetic for a small model.
            with torch.no_grad():
                norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
                if max_norm is not None:
                    torch._foreach_mul_(gradients, torch.clamp(max_norm / (norm + 1e-6), max=1.0))
            return norm
        if max_norm is not None:
            norm = nn.utils.clip_grad_norm_(self._parameters, max_norm)
        else:
            norm = nn.utils.get_total_norm(gradients)
        return to_device(norm, self.device)  # torch's is on the device of the first gradient

    def step(self, optimizer: torch.optim.Optimizer, *, skip: torch.Tensor | None = None) -> bool:
        """Apply the gradients, unless `skip` is set. With fp16 a step that overflowed is skipped."""
        if self._scaler is None:
            if skip is None:
                optimizer.step()
            else:
                step_unless(skip, optimizer)
            return True
        before = self._scaler.get_scale()  # sync: with fp16 the schedule depends on whether the scaler stepped
        if skip is None or not skip.item():  # sync: with fp16 only
            self._scaler.step(optimizer)
        self._scaler.update()
        return self._scaler.get_scale() >= before  # sync

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor: there is only one process."""
        return tensor

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor."""
        return tensor

    def gather_objects(self, value: Any) -> list[Any]:
        """Return a list with this value only."""
        return [value]

    def all_reduce_max(self, values: Sequence[int]) -> Callable[[], list[int]]:
        """Return a function that returns the values: there is only one process."""
        return lambda: list(values)

    def barrier(self) -> None:
        """Return at once."""

    def state_parts(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Stateful]:
        """Return the model, the optimizer, and with fp16 the scaler."""
        parts: dict[str, Stateful] = {"model": model}
        if optimizer is not None:
            parts["optimizer"] = optimizer
        if self._scaler is not None:
            parts["scaler"] = self._scaler
        return parts

    def full_state_dict(self, model: nn.Module) -> dict[str, Any]:
        """Return the model's own state dict."""
        return model.state_dict()

    def close(self, *, failed: bool = False) -> None:
        """Do nothing: no process group was joined."""


def are_of_one_kind(parameters: list[torch.Tensor]) -> bool:
    """Whether torch computes the norms of these parameters' gradients together: one device, one type, no subclass."""
    kinds = {(type(parameter), parameter.device, parameter.dtype) for parameter in parameters}
    kind, device, _ = next(iter(kinds), (None, torch.device("meta"), None))
    return len(kinds) == 1 and kind is nn.Parameter and device.type in ("cpu", "cuda")
