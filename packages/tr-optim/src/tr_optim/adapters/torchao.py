"""torchao's AdamW of 8 or 4 bits, with numbers for learning rates and a state of plain tensors."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch

from tr_optim.adapters import WholeParameters, require
from tr_optim.engine.updates import run_closure

_LIBRARY = require("torchao.optim", "torchao")
# Without torch's wrapper of the library's class, which would call hooks twice.
_STEP: Any = inspect.unwrap(_LIBRARY.AdamW8bit.step)
_MOMENTS = {"exp_avg": True, "exp_avg_sq": False}  # and whether it has negative numbers


class _Quantized(WholeParameters):
    """Base of the library's optimizers.

    A state is `step` and for each moment `exp_avg`, `exp_avg_sq` its codes and the scale of each block, as
    `exp_avg.codes` and `exp_avg.scale`; of less than 4096 elements, or elements that blocks do not divide, the moment.

    Attributes:
        bits: of a code.

    The learning rate of a group stays a number, as schedules set and loggers read it.
    """

    bits = 8
    why_whole = "and codes of such parts are not saved here"

    if TYPE_CHECKING:  # attributes of the library's classes
        block_size: int
        _new_buffer: Callable[..., Any]

    def __init__(
        self,
        params: Iterable[torch.Tensor] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        compile: bool | None = None,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay)  # type: ignore[call-arg]
        self._compiles = compile

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Apply the gradients. Returns the result of `closure`, if one is given."""
        result = run_closure(closure)
        groups = self.param_groups
        try:
            self.param_groups = [{**group, "lr": torch.as_tensor(group["lr"], dtype=torch.float32)} for group in groups]
            stance = nullcontext() if self._should_compile() else torch.compiler.set_stance("force_eager")
            with torch.no_grad(), stance:
                _STEP(self)
        finally:
            self.param_groups = groups
        return result

    def expected_bytes(self, micro_batches: int = 1) -> tuple[int, int]:
        """Return the bytes of all gradients, and of the state after a step.

        Args:
            micro_batches: micro-batches in a step; gradients of several take no more memory.
        """
        trainable = [p for group in self.param_groups for p in group["params"] if p.requires_grad]
        total = 0
        for parameter in trainable:
            count, block = parameter.numel(), self.block_size
            if count >= 4096 and count % block == 0:
                total += 4 + len(_MOMENTS) * (count * self.bits // 8 + 4 * count // block)
            else:
                total += 4 + len(_MOMENTS) * count * parameter.element_size()
        return sum(parameter.numel() * parameter.element_size() for parameter in trainable), total

    def _should_compile(self) -> bool:
        if self._compiles is not None:
            return self._compiles
        return any(p.device.type != "cpu" for group in self.param_groups for p in group["params"])

    def state_dict(self) -> dict[str, Any]:
        """Return the state, of plain tensors."""
        found = super().state_dict()
        return {**found, "state": {number: _plain(state) for number, state in found["state"].items()}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state, of this class or of the library's own, as copies.

        Raises:
            ValueError: its shapes or bits are different.
        """
        saved_ids = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        states = {number: _plain(state) for number, state in state_dict["state"].items()}
        super().load_state_dict({**state_dict, "state": {}})
        for group in self.param_groups:
            group["lr"] = float(group["lr"])
        parameters = list(chain.from_iterable(group["params"] for group in self.param_groups))
        for saved_id, parameter in zip(saved_ids, parameters, strict=True):
            if saved_id in states:
                self.state[parameter] = self._restored(states[saved_id], parameter)

    @torch.no_grad()
    def _restored(self, saved: dict[str, Any], parameter: torch.Tensor) -> dict[str, Any]:
        state: dict[str, Any] = {"step": saved["step"].to("cpu", torch.float32, copy=True)}
        for name, signed in _MOMENTS.items():
            state[name] = self._new_buffer(parameter, signed)
            parts = {name: state[name]} if not _is_quantized(state[name]) else _parts(name, state[name])
            for key, part in parts.items():
                if key not in saved or saved[key].shape != part.shape:
                    shape = tuple(saved[key].shape) if key in saved else None
                    raise ValueError(
                        f"{type(self).__name__}: the saved {key} of a parameter of shape {tuple(parameter.shape)} has "
                        f"the shape {shape}, and {tuple(part.shape)} is needed; resume with the model and the "
                        "optimizer that it was saved with"
                    )
                part.copy_(saved[key])
        return state


class TorchAOAdamW8bit(_Quantized, _LIBRARY.AdamW8bit):
    """torchao's AdamW, whose moments are codes of 8 bits, with a scale for each 256 of them.

    Fixed: learning rates are numbers, where the library wants tensors that a schedule may replace; the state is plain
    tensors, and keeps its scales in float32 for weights of lower precision too.

    Source: Dettmers et al., "8-bit optimizers via block-wise quantization" (2022), by torchao.

    State of a parameter of n elements: 2 n + n / 32 bytes, against 8 n of AdamW.

    Args:
        params: parameters or groups.
        lr: learning rate.
        betas: decay of the two moments.
        eps: added to the root of the second moment.
        weight_decay: share of the weights, times the learning rate, that each step subtracts.
        compile: compile the update for each shape, as the library does, in the first step. On a CPU that takes seconds
            for each and a C++ compiler; None does so on other devices only. Results differ by rounding.

    Raises:
        ValueError: an argument is out of range, or a parameter is a DTensor.
    """


class TorchAOAdamW4bit(_Quantized, _LIBRARY.AdamW4bit):
    """torchao's AdamW, whose moments are codes of 4 bits, with a scale for each 128 of them; see `TorchAOAdamW8bit`.

    Source: Li et al., "Memory efficient optimizers with 4-bit states" (2023), by torchao.

    State of a parameter of n elements: n + n / 16 bytes.

    Args:
        params: parameters or groups.
        lr: learning rate.
        betas: decay of the two moments.
        eps: added to the root of the second moment.
        weight_decay: share of the weights, times the learning rate, that each step subtracts.
        compile: compile the update for each shape; see there.

    Raises:
        ValueError: an argument is out of range, or a parameter is a DTensor.
    """

    bits = 4


def _is_quantized(value: Any) -> bool:
    return hasattr(value, "codes")


def _parts(name: str, moment: Any) -> dict[str, torch.Tensor]:
    return {f"{name}.codes": moment.codes, f"{name}.scale": moment.scale}


def _plain(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for name, value in state.items():
        found |= _parts(name, value) if _is_quantized(value) else {name: value}
    return found
