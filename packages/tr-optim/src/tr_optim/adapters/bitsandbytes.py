"""bitsandbytes' AdamW, AdEMAMix, Lion and RMSprop with 8 or 32 bits, with a state of plain tensors and own settings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from tr_optim.adapters import require
from tr_optim.engine.checks import all_or_nothing
from tr_optim.engine.shards import sharded_parameters

_LIBRARY = require("bitsandbytes.optim", "bitsandbytes")
_TABLES = {"qmap1": "dynamic", "qmap2": "udynamic"}


class _Blockwise(Optimizer):
    """Base of the library's optimizers.

    A state is `step`, `state1`, and with AdamW and AdEMAMix `state2`: float32 of the parameter's shape, or its codes
    (uint8) with `absmax1`, `absmax2`, the greatest size in each block of 256 elements. The tables of code values, which
    are the same for all, are not saved. AdEMAMix has two moments in `state1`, one after the other.

    Attributes:
        num_moments: 1, 2 or 3.
        own_options: options of groups that only this method has.
    """

    num_moments = 1
    own_options: tuple[str, ...] = ()

    if TYPE_CHECKING:  # attributes of the library's classes
        is_paged: bool
        args: Any
        name2qmap: dict[str, torch.Tensor]
        get_state_buffer: Callable[..., torch.Tensor]
        _FSDP_WRAPPED_QUANT_STATE_KEY: str

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        # Those of another method, which would do nothing here.
        for group in (self.defaults, *self.param_groups):
            for name in {"alpha", "t_alpha", "t_beta3"}.difference(self.own_options):
                group.pop(name, None)

    @all_or_nothing
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; its `optim_bits` may be its own.

        Raises:
            ValueError: a parameter cannot be updated, or the bits are neither 8 nor 32.
        """
        self.defaults = {**vars(self).pop("_bits", {}), **self.defaults}
        super().add_param_group(param_group)
        group, name = self.param_groups[-1], type(self).__name__
        if group["optim_bits"] not in (8, 32):
            raise ValueError(f"{name}: optim_bits={group['optim_bits']!r} must be 8 or 32")
        instead = "and bitsandbytes looks for its memory; train with replicas (strategy='ddp'), or use adamw_torch"
        sharded_parameters(group["params"], name, takes=False, instead=instead)
        for parameter in group["params"]:
            if parameter.device.type == "xla":
                raise ValueError(
                    f"{name}: a parameter of shape {tuple(parameter.shape)} is on {parameter.device}, and bitsandbytes "
                    "has no kernels for XLA; use adamw_torch, or adamw_8bit for moments in 8 bits, which are torch's "
                    "operations alone"
                )
            if self.is_paged and parameter.device.type == "cpu":
                raise ValueError(
                    f"{name}: paged state moves between the memory of a GPU and of its host, and a parameter of shape "
                    f"{tuple(parameter.shape)} is on the CPU; use the optimizer that is not paged, such as "
                    "adamw_bnb_8bit for paged_adamw_8bit"
                )

    def get_config(self, gindex: int, pindex: int, group: dict[str, Any]) -> dict[str, Any]:
        """Return the options of a parameter: only those of its group.

        The library adds options that were registered for another optimizer's parameter with the same number, or with
        the same address.
        """
        own = ("lr", "betas", "eps", "weight_decay", "optim_bits", *self.own_options)
        fixed = {"min_8bit_size": self.args.min_8bit_size, "max_unorm": 0.0, "skip_zeros": False}
        unused = {"alpha": 0.0, "t_alpha": None, "t_beta3": None}
        return {**unused, **fixed, **{name: group[name] for name in own}}

    def check_overrides(self) -> None:
        """Ignore options that were registered for all optimizers."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state, of plain tensors by the names of the library."""
        found = super().state_dict()
        states = {number: _plain(self._unwrapped(saved)) for number, saved in found["state"].items()}
        return {**found, "state": states}

    def load_state_dict(self, state_dict: dict[str, Any], move_to_device: bool = True) -> None:
        """Load a state, of this class or of the library's own, as copies.

        Raises:
            ValueError: its shapes or bits are different.
        """
        saved_ids = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        before = [dict(group) for group in self.param_groups]
        states = {number: _plain(self._unwrapped(saved)) for number, saved in state_dict["state"].items()}
        Optimizer.load_state_dict(self, {**state_dict, "state": {}})
        for group, options in zip(self.param_groups, before, strict=True):
            group.update({name: value for name, value in options.items() if name not in group})
        for saved_id, (parameter, group) in zip(saved_ids, list(self._each()), strict=True):
            if saved_id in states:
                self.state[parameter] = self._restored(states[saved_id], parameter, group)

    def expected_bytes(self, micro_batches: int = 1) -> tuple[int, int]:
        """Return the bytes of all gradients, and of the state after a step.

        Args:
            micro_batches: micro-batches in a step; gradients of several take no more memory.
        """
        trainable = [(parameter, group) for parameter, group in self._each() if parameter.requires_grad]
        total = 0
        for parameter, group in trainable:
            count, has_codes = parameter.numel(), self._has_codes(parameter, group)
            total += self.num_moments * (count + 4 * -(-count // 256) if has_codes else 4 * count)
        return sum(parameter.numel() * parameter.element_size() for parameter, _ in trainable), total

    def _has_codes(self, parameter: torch.Tensor, group: dict[str, Any]) -> bool:
        return group["optim_bits"] == 8 and parameter.numel() >= self.args.min_8bit_size

    def _each(self) -> Iterator[tuple[torch.Tensor, dict[str, Any]]]:
        return ((parameter, group) for group in self.param_groups for parameter in group["params"])

    def _unwrapped(self, saved: dict[str, Any]) -> dict[str, Any]:
        own = {name: value for name, value in saved.items() if name != self._FSDP_WRAPPED_QUANT_STATE_KEY}
        return {**own, **saved.get(self._FSDP_WRAPPED_QUANT_STATE_KEY, {})}

    def _restored(self, saved: dict[str, Any], parameter: torch.Tensor, group: dict[str, Any]) -> dict[str, Any]:
        dtype = torch.uint8 if self._has_codes(parameter, group) else torch.float32
        state: dict[str, Any] = {"step": int(saved["step"])}
        for name in [name for name in ("state1", "state2") if name in saved]:
            value, buffer = saved[name], self._buffer(name, parameter, dtype)
            if value.shape != buffer.shape or value.dtype != dtype:
                raise ValueError(
                    f"{type(self).__name__}: the saved {name} of a parameter of shape {tuple(parameter.shape)} is "
                    f"{value.dtype} of shape {tuple(value.shape)}, and {dtype} of shape {tuple(buffer.shape)} is "
                    "needed; resume with the model and the optimizer that it was saved with"
                )
            state[name] = buffer
            buffer.copy_(value)
            number = name[-1]
            if dtype == torch.uint8:
                table = _TABLES[f"qmap{number}"]
                self.name2qmap[table] = self.name2qmap[table].to(parameter.device)
                state[f"qmap{number}"] = self.name2qmap[table]
                state[f"absmax{number}"] = saved[f"absmax{number}"].to(parameter.device, torch.float32, copy=True)
        return state

    def _buffer(self, name: str, parameter: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return self.get_state_buffer(parameter, dtype=dtype)


class BitsAndBytesAdamW(_Blockwise, _LIBRARY.AdamW):
    """bitsandbytes' AdamW, whose moments are codes of 8 bits, with a scale for each 256 of them.

    Fixed: the state is plain tensors, and nothing that was registered with the library for other parameters counts
    (see `get_config`). A parameter of less than 4096 elements has moments of 32 bits.

    Source: Dettmers et al., "8-bit optimizers via block-wise quantization" (2022), by bitsandbytes.

    State of a parameter of n elements: 2 n + n / 32 bytes, against 8 n of AdamW.

    Args:
        params: parameters or groups; a group's `optim_bits` may differ.
        lr: learning rate.
        betas: decay of the two moments.
        eps: added to the root of the second moment.
        weight_decay: share of the weights, times the learning rate, that each step subtracts.
        optim_bits: 8, or 32 for moments as they are.
        is_paged: keep the state in memory that a GPU can move to its host.

    Raises:
        ValueError: an argument is out of range, or a parameter cannot be updated.
    """

    num_moments = 2

    def __init__(
        self,
        params: Iterable[torch.Tensor] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        optim_bits: int = 8,
        is_paged: bool = False,
    ) -> None:
        self._bits, self.is_paged = {"optim_bits": optim_bits}, is_paged
        super().__init__(params, lr, betas, eps, weight_decay, optim_bits=8, is_paged=is_paged)


class BitsAndBytesLion(_Blockwise, _LIBRARY.Lion):
    """bitsandbytes' Lion, whose moment is codes of 8 bits; see `BitsAndBytesAdamW`.

    Source: Chen et al., "Symbolic discovery of optimization algorithms" (2023), Algorithm 2, by bitsandbytes.

    State of a parameter of n elements: n + n / 64 bytes.

    Args:
        params: parameters or groups; a group's `optim_bits` may differ.
        lr: learning rate.
        betas: share of the moment in the update, and its decay.
        weight_decay: share of the weights, times the learning rate, that each step subtracts.
        optim_bits: 8, or 32 for a moment as it is.
        is_paged: keep the state in memory that a GPU can move to its host.

    Raises:
        ValueError: an argument is out of range, or a parameter cannot be updated.
    """

    def __init__(
        self,
        params: Iterable[torch.Tensor] | Iterable[dict[str, Any]],
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        optim_bits: int = 8,
        is_paged: bool = False,
    ) -> None:
        self._bits, self.is_paged = {"optim_bits": optim_bits}, is_paged
        super().__init__(params, lr, betas, weight_decay, optim_bits=8, is_paged=is_paged)


class BitsAndBytesAdEMAMix(_Blockwise, _LIBRARY.AdEMAMix):
    """bitsandbytes' AdEMAMix: AdamW with a second, slower average of gradients; see `BitsAndBytesAdamW`.

    Source: Pagliardini et al., "The AdEMAMix optimizer: better, faster, older" (2024), by bitsandbytes.

    State of a parameter of n elements: 12 n bytes, or with codes 3 n + 3 n / 64.

    Args:
        params: parameters or groups; a group's `optim_bits` may differ.
        lr: learning rate.
        betas: decay of the fast average, of the second moment, and of the slow average.
        eps: added to the root of the second moment.
        weight_decay: share of the weights, times the learning rate, that each step subtracts.
        alpha: weight of the slow average in the update.
        t_alpha: steps in which alpha grows from 0; None is no growth.
        t_beta3: steps in which the decay of the slow average grows from that of the fast one; None is no growth.
        optim_bits: 8, or 32 for moments as they are.
        is_paged: keep the state in memory that a GPU can move to its host.

    Raises:
        ValueError: an argument is out of range, or a parameter cannot be updated.
    """

    num_moments = 3
    own_options = ("alpha", "t_alpha", "t_beta3")

    if TYPE_CHECKING:
        _get_state_double_buffer: Callable[..., torch.Tensor]

    def __init__(
        self,
        params: Iterable[torch.Tensor] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        betas: tuple[float, float, float] = (0.9, 0.999, 0.9999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        alpha: float = 5.0,
        t_alpha: int | None = None,
        t_beta3: int | None = None,
        optim_bits: int = 8,
        is_paged: bool = False,
    ) -> None:
        self._bits, self.is_paged = {"optim_bits": optim_bits}, is_paged
        given = (lr, betas, alpha, t_alpha, t_beta3, eps, weight_decay)
        super().__init__(params, *given, optim_bits=8, is_paged=is_paged)

    def _buffer(self, name: str, parameter: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        if name == "state1":
            return self._get_state_double_buffer(parameter, dtype=dtype)
        return super()._buffer(name, parameter, dtype)


class BitsAndBytesRMSprop(_Blockwise, _LIBRARY.RMSprop):
    """bitsandbytes' RMSprop, whose moment is codes of 8 bits; see `BitsAndBytesAdamW`.

    The library's argument `momentum` does nothing, so there is none here.

    Source: Tieleman and Hinton, "Lecture 6.5: RMSprop" (2012), by bitsandbytes.

    State of a parameter of n elements: n + n / 64 bytes.

    Args:
        params: parameters or groups; a group's `optim_bits` may differ.
        lr: learning rate.
        alpha: decay of the moment.
        eps: added to the root of the moment.
        weight_decay: share of the weights that is added to the gradient.
        optim_bits: 8, or 32 for a moment as it is.

    Raises:
        ValueError: an argument is out of range, or a parameter cannot be updated.
    """

    def __init__(
        self,
        params: Iterable[torch.Tensor] | Iterable[dict[str, Any]],
        lr: float = 1e-2,
        alpha: float = 0.99,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        optim_bits: int = 8,
    ) -> None:
        if alpha == 0:
            raise ValueError("BitsAndBytesRMSprop: alpha=0 must be greater than 0, and at most 1")
        self._bits, self.is_paged = {"optim_bits": optim_bits}, False
        super().__init__(params, lr, alpha, eps, weight_decay, optim_bits=8)


def _plain(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return a state without tables, its count of steps as a tensor."""
    return {
        name: value if isinstance(value, torch.Tensor) else torch.tensor(float(value), dtype=torch.float64)
        for name, value in state.items()
        if name not in _TABLES
    }
