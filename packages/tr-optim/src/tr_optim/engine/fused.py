"""Update every parameter in the backward pass as soon as its gradient is computed, and free the gradient.

`LossScaler` scales losses for float16 with optimizers that free their gradients in the backward pass.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler, OptState

from tr_optim.engine.backward_norms import logical_or
from tr_optim.engine.fused_checks import check_settings, no_accumulation, refuse_unknown_ranks
from tr_optim.engine.fused_passes import FusedPasses, Tensors
from tr_optim.engine.shards import local_part


class FusedOptimizer(FusedPasses):
    """An optimizer without gradients: `backward(loss)` computes, applies and frees them one by one.

    A subclass implements `update`. `backward` makes one pass, or two if the updates depend on all gradients (clipping
    by norm, skipping a whole step). The first measures and frees them and keeps the graph, the second applies them.
    Nothing is read back to the host. With several ranks, each gradient is averaged before it is used.

    Args:
        params: parameters or parameter groups.
        defaults: options of a group.
        clip_grad_norm: greatest total 2-norm of the gradients; costs a second backward pass.
        clip_grad_value: greatest size of any number of the gradients.
        accumulate: `refuse` several micro-batches in a step, or `store` their gradients until the last one.
        nonfinite: what happens to gradients that are infinite or NaN (see `Lomo`).
        rounding_seed: of stochastic rounding; None rounds to nearest.

    Attributes:
        found_inf: 1.0 on the device where a gradient of the last `backward` was not finite, else 0.0.
        num_passes: backward passes made since it was built.
    """

    fused_in_backward = True
    updates_in_backward = True
    reduces_own_gradients = True
    norm_is_estimated = False

    @property
    def leaves_out_nonfinite(self) -> bool:
        """Whether a step whose loss or norm is not finite on any rank changes nothing."""
        return self._nonfinite == "skip_step"

    # What a loop calls

    def bind(self, collectives: Any) -> None:
        """Set the ranks, and how values are exchanged between them.

        Args:
            collectives: a `tr_core.protocols.Collectives`, as `tr_dist.DDP()` is one; used are `world_size`, `sum`
                and `gather_objects`. They average gradients of whole parameters. Those of what `fully_shard` divides
                come averaged (leave set_requires_gradient_sync on); sums over rows go through their own mesh.
        """
        self._collectives, self._world_size = collectives, collectives.world_size
        self.detach()  # the next pass finds out again what is averaged

    def clip_to(self, max_norm: float | None) -> None:
        """Clip gradients to a total norm from the next `backward` on; None changes nothing.

        Raises:
            ValueError: it was built with another norm.
        """
        if max_norm is None or max_norm == self._max_norm:
            return
        if self._max_norm is not None:
            raise ValueError(
                f"{type(self).__name__} was built with clip_grad_norm={self._max_norm:g}, but its loop clips to "
                f"{max_norm:g} (max_grad_norm); give one of them, or both the same"
            )
        check_settings(max_norm, self._max_value, self._accumulate, self._nonfinite)
        self._max_norm = max_norm

    def backward(self, loss: torch.Tensor, *, last: bool = True, scale: torch.Tensor | None = None) -> None:
        """Compute the gradients of a micro-batch's loss and apply them.

        Args:
            loss: scalar, already divided for the micro-batches of the step.
            last: whether it is the last micro-batch of its step.
            scale: scalar on the device that the loss is multiplied by, and gradients are divided by in float32.

        Raises:
            RuntimeError: the step's gradients are applied already; ranks would go different ways; or see
                `BackwardPass.run`.
            ValueError: there are several micro-batches in a step, and `accumulate` is `refuse`.
        """
        self._check_may_begin(last)
        self._group_of = {id(p): group for group in self.param_groups for p in group["params"]}
        self._scale = scale
        scaled = loss if scale is None else loss * scale
        if self.leaves_out_nonfinite:
            self._bad_loss = logical_or(self._bad_loss, ~loss.detach().isfinite())
        if self._num_stored or not last:
            self._store(scaled)
            if last:
                self._apply_stored()
        else:
            self._attach(scaled)
            if self._max_norm is not None or self._skips() == "skip_step":
                self._pass(scaled, self._measure, then_another=True)
                self._decide()
                self._pass(scaled, self._apply)
            else:
                self._factor = None if scale is None else scale.reciprocal()
                self._leave_out = None
                self._pass(scaled, self._measure_and_apply)
                self._note_norm()
        self._is_applied = last

    def clip_grad_norm(self, max_norm: float | None) -> torch.Tensor:
        """Return the total 2-norm of the last `backward`'s gradients before clipping, a new scalar tensor.

        They were clipped in that pass, and cannot be clipped any more.

        Raises:
            ValueError: they were clipped to another norm than `max_norm`, or not at all.
            RuntimeError: there was no `backward` in this step.
        """
        if self._norm is None:
            raise RuntimeError(f"there is no gradient norm: call backward(loss) of {type(self).__name__} first")
        if max_norm is not None and max_norm != self._max_norm:
            built = "without clipping" if self._max_norm is None else f"with clip_grad_norm={self._max_norm:g}"
            raise ValueError(
                f"clip_grad_norm({max_norm:g}) comes too late: {type(self).__name__} applied the gradients during the "
                f"backward pass, {built}; build it with clip_grad_norm={max_norm:g}"
            )
        return self._norm.clone()

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """End a step; `backward` has already applied its updates.

        Raises:
            RuntimeError: `backward` was not called since the last step.
            ValueError: a closure is given.
        """
        if closure is not None:
            raise ValueError(
                f"{type(self).__name__} takes no closure: it updates during the backward pass; call "
                "optimizer.backward(loss), then optimizer.step()"
            )
        if not self._is_applied:
            raise RuntimeError(
                f"step() has nothing to apply: {type(self).__name__} updates during its own backward pass; call "
                "optimizer.backward(loss) in place of loss.backward()"
            )
        self._is_applied = False

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop stored gradients, and those of a plain `loss.backward()`."""
        super().zero_grad(set_to_none=True)
        self._is_applied, self._num_stored = False, 0
        self._norm = self._bad_loss = None

    def expected_bytes(self, micro_batches: int = 1) -> tuple[int, int]:
        """Return the bytes of gradients in memory at a time, and of the state after a step."""
        parameters = [p for group in self.param_groups for p in group["params"] if p.requires_grad]
        sizes = sorted(local_part(p).numel() * p.element_size() for p in parameters)
        at_a_time = sizes if self._accumulate == "store" else sizes[-2:]
        return sum(at_a_time), sum(self.state_bytes(p) for p in parameters)

    def state_bytes(self, parameter: torch.Tensor) -> int:
        """Return the bytes of a parameter's state."""
        return 0

    # Several micro-batches in a step

    def _store(self, loss: torch.Tensor) -> None:
        if not self._num_stored:
            self._attach(loss)
            if any(p.grad is not None for p in self._backward_pass.parameters):
                raise RuntimeError(
                    "parameters hold gradients that this step's backward passes did not make; call zero_grad() after "
                    "a plain loss.backward(), or optimizer.backward(loss) in its place"
                )
        self._num_stored += 1
        self.num_passes += 1
        loss.backward()

    @torch.no_grad()
    def _apply_stored(self) -> None:
        """Apply the sums of the step's micro-batches in `.grad`; they are complete, so one pass is enough."""

        def keep(parameters: Tensors, gradients: Tensors, unused: torch.Tensor | None) -> None:
            self._measure(parameters, gradients, unused)
            stored.append((parameters, gradients, unused))

        stored: list[tuple[Tensors, Tensors, torch.Tensor | None]] = []
        self._num_stored = 0
        self._begin_pass(keep)
        for parameter in reversed(self._backward_pass.parameters):
            gradient, parameter.grad = parameter.grad, None
            if gradient is not None:
                self._take(parameter, gradient)
        self._finish_pass()
        self._decide()
        while stored:
            self._apply(*stored.pop())

    def _check_may_begin(self, last: bool) -> None:
        name = type(self).__name__
        if self._is_applied:
            raise RuntimeError(
                f"a second backward() in one step: {name} has applied the first one's gradients already; call step() "
                "after each, or give last=False with all but the last micro-batch and build it with accumulate='store'"
            )
        if not last and self._accumulate == "refuse":
            raise ValueError(no_accumulation(name, self.ordinary))
        if self._collectives is None:
            refuse_unknown_ranks(name)


class LossScaler(GradScaler):
    """torch's `GradScaler` for optimizers that free their gradients in the backward pass.

    torch's looks for overflows in `.grad`, and raises if there is none. This one reads the flag of the optimizer's
    hooks, `optimizer.found_inf`. Scale, growth, backoff and the saved state are torch's. With any other optimizer it
    behaves like torch's.

        scaler = LossScaler("cuda")
        scaler.backward(optimizer, loss)  # in place of scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    An optimizer that updates during the backward pass skips an update with an overflow by itself, and `step` reads
    nothing back. For other optimizers `step` reads the flag, as torch's does.

    Args:
        device: type of the device that losses are on.
        options: `init_scale`, `growth_factor`, `backoff_factor`, `growth_interval`, `enabled`, as torch's.
    """

    def __init__(self, device: str = "cuda", **options: Any) -> None:
        super().__init__(device, **options)
        self._one: torch.Tensor | None = None

    def backward(self, optimizer: Any, loss: torch.Tensor, *, last: bool = True) -> None:
        """Compute the gradients of a scaled loss; the optimizer consumes them.

        Args:
            optimizer: one that consumes gradients in its own `backward`.
            loss: scalar, not scaled.
            last: whether it is the last micro-batch of its step.
        """
        if self._one is None or self._one.device != loss.device:
            self._one = torch.ones((), device=loss.device)
        scale = self.scale(self._one) if self.is_enabled() else None
        optimizer.backward(loss, last=last, scale=scale)

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Read the optimizer's flag; its gradients were already divided by the scale."""
        if not _consumes_gradients(optimizer) or not self.is_enabled():
            super().unscale_(optimizer)
            return
        self._check_scale_growth_tracker("unscale_")
        state = self._per_optimizer_states[id(optimizer)]
        if state["stage"] is not OptState.READY:
            raise RuntimeError("unscale_() has already been called on this optimizer since the last update().")
        found = getattr(optimizer, "found_inf", None)
        if found is None:
            raise RuntimeError(
                f"{type(optimizer).__name__} has found nothing yet; call scaler.backward(optimizer, loss) first"
            )
        # A copy: update() adds up the flags of several optimizers in place.
        state["found_inf_per_device"] = {found.device: found.clone()}
        state["stage"] = OptState.UNSCALED

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Apply the gradients of the backward passes, unless one overflowed."""
        if not _consumes_gradients(optimizer) or not self.is_enabled():
            return super().step(optimizer, *args, **kwargs)
        state = self._per_optimizer_states[id(optimizer)]
        if state["stage"] is OptState.STEPPED:
            raise RuntimeError("step() has already been called since the last update().")
        if state["stage"] is OptState.READY:
            self.unscale_(optimizer)
        result = None
        if getattr(optimizer, "updates_in_backward", False):
            result = optimizer.step(*args, **kwargs)
        else:
            result = self._maybe_opt_step(optimizer, state, *args, **kwargs)  # sync: as torch's scaler
        state["stage"] = OptState.STEPPED
        return result


def _consumes_gradients(optimizer: torch.optim.Optimizer) -> bool:
    return bool(getattr(optimizer, "fused_in_backward", False))
