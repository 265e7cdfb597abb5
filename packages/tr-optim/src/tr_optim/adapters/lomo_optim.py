"""lomo_optim's arithmetic of an update, one gradient at a time, without what it does around that."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from tr_optim.adalomo import AdaLomo
from tr_optim.adapters import require
from tr_optim.engine.checks import all_or_nothing
from tr_optim.engine.fused import FusedOptimizer
from tr_optim.engine.fused_passes import FusedPasses
from tr_optim.engine.shards import sharded_parameters
from tr_optim.lomo import Lomo
from tr_optim.moments.adafactor import start

_LIBRARY = require("lomo_optim", "lomo-optim")
_NAME = "parameter"
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class _OneParameter:
    """What the library takes for a model, and for that model's only parameter.

    In every hook the library goes through the parameters of its model and updates those that have a gradient. Here it
    finds one, and none while it is built: it then puts on no hooks, and no state on a GPU that may not be there.

    Attributes:
        data: the weights that are updated, in place and seen by autograd.
        grad: their gradient; None for no parameter at all.
    """

    requires_grad = True

    def __init__(self) -> None:
        self.data = torch.zeros(0)
        self.grad: torch.Tensor | None = None

    def named_parameters(self) -> Iterator[tuple[str, _OneParameter]]:
        if self.grad is not None:
            yield _NAME, self

    def parameters(self) -> list[nn.Parameter]:
        return [nn.Parameter(self.data)]  # the library's base class wants one

    def numel(self) -> int:
        return self.data.numel()


class _ByLibrary(FusedOptimizer):
    """Base of the library's optimizers, beside a class of this package that they have the interface of.

    Attributes:
        library: the library's class.
        own: the class of this package.
    """

    library: Any
    own = ""
    takes_shards = exchanges_statistics = stacks_shapes = False
    # One gradient at a time.
    update_all, update_parts = FusedPasses.update_all, FusedPasses.update_parts

    def _begin_anew(self) -> None:
        if self._rounding_seed is not None:
            raise ValueError(
                f"{type(self).__name__}: stochastic_rounding=True is not in lomo_optim's arithmetic; leave it out, or "
                f"use {self.own}"
            )
        super()._begin_anew()
        self._one = _OneParameter()
        self._library = self.library(self._one)
        self._library.loss_scale = None  # the loss is scaled, if at all, and gradients divided, before it sees them
        if self._library.zero3_enabled:
            raise ValueError(
                f"{type(self).__name__} does not train parameters that DeepSpeed's ZeRO-3 has divided; use {self.own} "
                "with replicas (strategy='ddp') or FSDP2's shards"
            )

    @all_or_nothing
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; refuse parameters and rates that the library cannot compute with.

        Raises:
            ValueError: the message says what is needed.
        """
        super().add_param_group(param_group)
        group, name = self.param_groups[-1], type(self).__name__
        for option in ("lr", "weight_decay"):
            if isinstance(group[option], torch.Tensor):
                raise ValueError(
                    f"{name}: {option} is a tensor, which lomo_optim would read back at every parameter; give a "
                    f"number, or use {self.own}"
                )
            if group[option] < 0:
                raise ValueError(f"{option}={group[option]:g} must not be negative")
        instead = f"and lomo_optim knows whole ones only; use {self.own}, or replicas (strategy='ddp')"
        sharded_parameters(group["params"], name, takes=False, instead=instead)
        for parameter in group["params"]:
            if parameter.dtype not in _DTYPES:
                raise ValueError(
                    f"{name}: a parameter of shape {tuple(parameter.shape)} is of {parameter.dtype}, and lomo_optim "
                    f"computes in float32, which would round it; use {self.own}"
                )

    def _apply_by_library(
        self, weights: torch.Tensor, gradient: torch.Tensor, factor: torch.Tensor | None, group: dict[str, Any]
    ) -> None:
        """Update weights in place with the library."""
        library, gradient = self._library, gradient.to(torch.float32)
        if factor is not None:
            gradient.mul_(factor)
        library.lr, library.weight_decay = group["lr"], group["weight_decay"]
        library.do_weight_decay, library.clip_grad_value = group["weight_decay"] > 0, self._max_value
        self._one.data, self._one.grad = weights, gradient
        try:
            library.grad_func(None)
        finally:
            self._one.data, self._one.grad = torch.zeros(0), None


class LomoOptimLomo(_ByLibrary, Lomo):
    """lomo_optim's Lomo, with the interface of `tr_optim.Lomo`.

        optimizer = LomoOptimLomo(model.parameters(), lr=1e-2, clip_grad_norm=1.0)
        optimizer.backward(model(**batch).loss)  # in place of loss.backward()
        optimizer.step()

    lomo_optim 0.1.1 computes each update. The library's own loop is not used, because it is wrong or slow: every hook
    visits all parameters; a plain `loss.backward()` trains; a clip coefficient is reused in the next step; ranks apply
    their own gradients; the loss scale starts with an overflow, only shrinks, and is not used under autocast; all
    groups share one learning rate and weight decay. In all of this the class behaves like `tr_optim.Lomo`, and refuses
    the same. It also refuses tensors for rates, float64 and shards.

    There is no state.

    Args:
        params: parameters or parameter groups, each with its own `lr` and `weight_decay`.
        lr: learning rate.
        weight_decay: share of the weights, times the learning rate, that each step subtracts before the update.
        clip_grad_norm: greatest total 2-norm of all gradients; None for no clipping.
        clip_grad_value: greatest absolute value in any gradient; instead of `clip_grad_norm`, in one pass.
        accumulate: `refuse` several micro-batches in a step, or `store` their gradients.
        nonfinite: as of `tr_optim.Lomo`.

    Raises:
        ValueError: an argument is out of range or contradicts another.
        RuntimeError: see `FusedOptimizer.backward`.
    """

    library, own, name = _LIBRARY.Lomo, "tr_optim.Lomo", "lomo_optim"

    def update(
        self,
        parameter: torch.Tensor,
        gradient: torch.Tensor,
        factor: torch.Tensor | None,
        leave_out: torch.Tensor | None,
    ) -> None:
        """Apply a gradient to its parameter (see `FusedOptimizer.update`)."""
        group = self._group_of[id(parameter)]
        if leave_out is None:
            self._apply_by_library(parameter, gradient, factor, group)
            return
        weights = parameter.detach().clone()
        self._apply_by_library(weights, gradient, factor, group)
        parameter.copy_(torch.where(leave_out, parameter, weights))


class LomoOptimAdaLomo(_ByLibrary, AdaLomo):
    """lomo_optim's AdaLomo, with the interface of `tr_optim.AdaLomo`, on any device.

    `LomoOptimLomo` describes what is not used of the library. In addition, the state is saved; the library has it in
    attributes outside the state dict. Each parameter counts its own updates; the library counts backward passes, so the
    moments of a parameter used for the first time would be too small. Weights of any number of dimensions are updated,
    and infinite or NaN gradients are skipped.

    lomo_optim waits for the device at every parameter, to compare its root mean square with `eps[1]`;
    `tr_optim.AdaLomo` does not. The state is that of `tr_optim.AdaLomo`, which can load it: `exp_avg_sq_row` and
    `exp_avg_sq_col`, or `exp_avg_sq` with less than two dimensions, and `step`, in float32.

    Args:
        params: parameters or parameter groups, each with its own `lr` and `weight_decay`.
        lr: learning rate, relative to each parameter's root mean square.
        weight_decay: share of the weights, times the rate, that each step subtracts.
        eps: added to squared gradients; and the least root mean square that a parameter is taken to have.
        clip_threshold: greatest root mean square of an update before the rate.
        decay_rate: negative; the t-th update takes in `t ** decay_rate` of the newest squares.
        clip_grad_norm: greatest total 2-norm of all gradients; None for no clipping.
        clip_grad_value: greatest absolute value in any gradient; instead of `clip_grad_norm`.
        accumulate: as of `LomoOptimLomo`.
        nonfinite: as of `tr_optim.AdaLomo`.

    Raises:
        ValueError: an argument is out of range or contradicts another.
        RuntimeError: see `FusedOptimizer.backward`.
    """

    library, own, name = _LIBRARY.AdaLomo, "tr_optim.AdaLomo", "adalomo_optim"

    def update(
        self,
        parameter: torch.Tensor,
        gradient: torch.Tensor,
        factor: torch.Tensor | None,
        leave_out: torch.Tensor | None,
    ) -> None:
        """Apply a gradient to its parameter (see `FusedOptimizer.update`)."""
        if parameter.numel() == 0 or (leave_out is not None and leave_out.item()):  # sync: as the library's own
            return
        library, group, state = self._library, self._group_of[id(parameter)], self.state[parameter]
        if not state:
            start(state, parameter)
        state["step"] += 1
        library.step_num = int(state["step"])  # sync: as the library's own
        library.eps, library.clip_threshold = group["eps"], group["clip_threshold"]
        library.decay_rate = group["decay_rate"]
        for name in ("exp_avg_sq", "exp_avg_sq_row", "exp_avg_sq_col"):
            setattr(library, name, {_NAME: state.get(name)})
        self._apply_by_library(parameter, gradient, factor, group)
