"""Update every parameter during the backward pass, as soon as its gradient is there, and free the gradient."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from tr_optim.engine import fused_checks as words
from tr_optim.engine.averaging import RankAverage
from tr_optim.engine.fused_checks import check_settings, refuse_kinds
from tr_optim.engine.hooks import BackwardHooks
from tr_optim.engine.pass_norms import PassNorms, either
from tr_optim.engine.repeated import is_reentrant, other_gradients_kept, repeated_parameters
from tr_optim.engine.shards import Shards, local_part, sharded_parameters
from tr_optim.engine.waiting import PartsWaiting, SmallWaiting, Tensors, Use

# Gradients of so few elements are used so many at a time, where that changes nothing.
_JOINED, _JOINED_AT_A_TIME = 2**13, 64


class FusedOptimizer(Optimizer):
    """An optimizer without gradients: `backward(loss)` computes, applies and frees them one by one.

    A subclass has `update`. What is the same for all: `backward` makes one pass, or two where the updates depend on all
    gradients (clipping by norm, leaving out a whole step): the first measures and frees them and keeps the graph, the
    second applies. Nothing is read back to the host. With several ranks, each gradient is averaged before it is used.

    Args:
        params: parameters or parameter groups.
        defaults: options of a group.
        clip_grad_norm: greatest total 2-norm of the gradients; costs a second backward pass.
        clip_grad_value: greatest size of any number of the gradients.
        accumulate: `refuse` several micro-batches in a step, or `store` their gradients until the last one.
        nonfinite: what happens to gradients that are infinite or NaN (see `Lomo`).

    Attributes:
        ordinary: the name of what does the same with ordinary gradients.
        nonfinite_unscaled: what `nonfinite=None` stands for where there is no loss scale; None applies all gradients.
        takes_shards: whether it can update parts of parameters, of which each rank holds some rows.
        exchanges_statistics: whether it needs numbers about the whole of such a parameter (see `update_parts`).
        found_inf: 1.0 on the device where a gradient of the last `backward` was not finite, else 0.0.
        num_passes: backward passes made since it was built.
    """

    fused_in_backward = True
    updates_in_backward = True
    reduces_own_gradients = True
    norm_is_estimated = False
    ordinary = ""  # the name of what does the same with ordinary gradients
    nonfinite_unscaled: str | None = None
    takes_shards = exchanges_statistics = False

    def __init__(
        self,
        params: Iterable[torch.Tensor] | Iterable[dict[str, Any]],
        defaults: dict[str, Any],
        *,
        clip_grad_norm: float | None,
        clip_grad_value: float | None,
        accumulate: str,
        nonfinite: str | None,
    ) -> None:
        check_settings(clip_grad_norm, clip_grad_value, accumulate, nonfinite)
        super().__init__(params, defaults)
        self._max_norm, self._max_value = clip_grad_norm, clip_grad_value
        self._accumulate, self._nonfinite = accumulate, nonfinite
        self._collectives: Any = None
        self._world_size = 1
        self._average: RankAverage | None = None
        self._hooks: BackwardHooks | None = None
        self._hooked: list[torch.Tensor] = []
        self._sharded: dict[int, Shards] = {}
        self._largest_part = 0
        self._group_of: dict[int, dict[str, Any]] = {}
        self._is_applied, self._num_stored, self._is_reentrant = False, 0, False
        self._norms = PassNorms()
        self._norm: torch.Tensor | None = None
        self._factor: torch.Tensor | None = None
        self._leave_out: torch.Tensor | None = None
        self._bad_loss: torch.Tensor | None = None
        self._scale: torch.Tensor | None = None
        self._use: Use = self._measure
        self.found_inf: torch.Tensor | None = None
        self.num_passes = 0

    def update(
        self,
        parameter: torch.Tensor,
        gradient: torch.Tensor,
        factor: torch.Tensor | None,
        leave_out: torch.Tensor | None,
    ) -> None:
        """Apply a gradient to its parameter.

        Args:
            parameter: what is changed in place, not by `.data`.
            gradient: its gradient, which may be changed.
            factor: what the gradient is to be multiplied by, a scalar on the device; None for 1.
            leave_out: scalar on the device; where it is True nothing changes, bit for bit. None for False.
        """
        raise NotImplementedError

    def update_all(
        self, parameters: Tensors, gradients: Tensors, factor: torch.Tensor | None, leave_out: torch.Tensor | None
    ) -> None:
        """Apply gradients to parameters of one group, dtype and device; see `update`."""
        for parameter, gradient in zip(parameters, gradients, strict=True):
            self.update(parameter, gradient, factor, leave_out)

    def update_parts(
        self,
        parameters: Tensors,
        gradients: Tensors,
        factor: torch.Tensor | None,
        leave_out: list[torch.Tensor | None],
    ) -> None:
        """Apply this rank's parts of gradients to those of their parameters; all ranks call it with the same ones."""
        for parameter, gradient, leave_it in zip(parameters, gradients, leave_out, strict=True):
            self.update(parameter, gradient, factor, leave_it)

    @property
    def leaves_out_nonfinite(self) -> bool:
        """Whether a step whose loss or norm is not finite on any rank changes nothing."""
        return self._nonfinite == "skip_step"

    # What a loop calls

    def bind(self, collectives: Any) -> None:
        """Take over who this process is among the others, and how values travel between them.

        Args:
            collectives: a `tr_core.protocols.Collectives`, as `tr_dist.DDP()` is one; used are `world_size`, `sum`
                and `gather_objects`. They average gradients of whole parameters. Those of what `fully_shard` divides
                come averaged (leave set_requires_gradient_sync on); sums over rows go through their own mesh.
        """
        self._collectives, self._world_size = collectives, collectives.world_size
        self._hooked = []

    def clip_to(self, max_norm: float | None) -> None:
        """Have gradients clipped to a total norm from the next `backward` on; None leaves it as it is.

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
            loss: scalar, already divided by what the step's losses are to be divided by.
            last: whether it is the last micro-batch of its step.
            scale: scalar on the device that the loss is multiplied by, and gradients are divided by in float32.

        Raises:
            RuntimeError: the step's gradients are applied already; ranks would go different ways; or see
                `BackwardHooks.run`.
            ValueError: there are several micro-batches in a step, and `accumulate` is `refuse`.
        """
        self._check_may_begin(last)
        self._group_of = {id(p): group for group in self.param_groups for p in group["params"]}
        self._scale = scale
        scaled = loss if scale is None else loss * scale
        if self.leaves_out_nonfinite:
            self._bad_loss = either(self._bad_loss, ~loss.detach().isfinite())
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

        They were clipped in that pass, so this can no longer do it.

        Raises:
            ValueError: they were clipped to another norm than `max_norm`, or not at all.
            RuntimeError: there was no `backward` in this step.
        """
        if self._norm is None:
            raise RuntimeError(f"there is no gradient norm: call backward(loss) of {type(self).__name__} first")
        if max_norm is not None and max_norm != self._max_norm:
            raise ValueError(words.clipped_too_late(type(self).__name__, max_norm, self._max_norm))
        return self._norm.clone()

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """End a step, whose updates `backward` has made.

        Raises:
            RuntimeError: `backward` has made none since the last step.
            ValueError: a closure is given.
        """
        if closure is not None:
            raise ValueError(words.no_closure(type(self).__name__))
        if not self._is_applied:
            raise RuntimeError(words.nothing_to_apply(type(self).__name__))
        self._is_applied = False

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget gradients that are stored, or that a plain `loss.backward()` has left."""
        super().zero_grad(set_to_none=True)
        self._is_applied, self._num_stored = False, 0
        self._norm = self._bad_loss = None

    def detach(self) -> None:
        """Take the hooks off the parameters; the next `backward` puts them on again."""
        if self._hooks is not None:
            self._hooks.detach()
        self._hooked = []

    def expected_bytes(self, micro_batches: int = 1) -> tuple[int, int]:
        """Return the bytes of the gradients that are there at a time, and those of the state after a step."""
        parameters = [p for group in self.param_groups for p in group["params"] if p.requires_grad]
        sizes = sorted(local_part(p).numel() * p.element_size() for p in parameters)
        at_a_time = sizes if self._accumulate == "store" else sizes[-2:]
        return sum(at_a_time), sum(self.state_bytes(p) for p in parameters)

    def state_bytes(self, parameter: torch.Tensor) -> int:
        """Return the bytes of a parameter's state."""
        return 0

    # One backward pass

    def _attach(self, loss: torch.Tensor) -> None:
        trainable = [p for group in self.param_groups for p in group["params"] if p.requires_grad]
        if [id(p) for p in trainable] == [id(p) for p in self._hooked]:
            return
        self.detach()
        takes, name = self.takes_shards, type(self).__name__
        self._sharded = sharded_parameters(trainable, name, takes=takes, instead=words.no_shards(self.ordinary))
        self._largest_part = max((p.numel() for p in trainable if id(p) in self._sharded), default=0)
        self._is_reentrant = is_reentrant(loss)
        repeated = repeated_parameters(loss, trainable) if self._is_reentrant else []
        self._hooks = BackwardHooks(trainable, self._take, shared=repeated)
        self._hooked = trainable
        self._average = None
        replicated = [p for p in trainable if id(p) not in self._sharded]
        if self._world_size > 1 and replicated:
            self._average = RankAverage(self._collectives, replicated, self._hand_on)

    def _pass(self, loss: torch.Tensor, use: Any, *, then_another: bool = False) -> None:
        """Make a backward pass and use its gradients; if another follows, those of other parameters wait for that."""
        self._begin_pass(use)
        self.num_passes += 1
        assert self._hooks is not None
        try:
            # Where parameters are not in the graph themselves, a backward pass cannot be told to reach these alone.
            if then_another and (self._is_reentrant or self._sharded):
                with other_gradients_kept(loss, self._hooked):
                    self._hooks.run(loss, retain_graph=True)
            else:
                self._hooks.run(loss, retain_graph=then_another, only_own=then_another)
            self._finish_pass()
        except BaseException:
            self.detach()  # what it holds of this pass is of no use to the next
            raise

    def _begin_pass(self, use: Any) -> None:
        self._use, self._norms = use, PassNorms()
        # Where single tensors are left out, or ranks might get them in different orders, each norm is needed by itself.
        by_itself = self._skips() == "skip_tensor"
        joins = self._average is None and not self._sharded and not by_itself
        self._small = SmallWaiting(_JOINED if joins else -1, _JOINED_AT_A_TIME, self._group_of, use)
        self._parts = PartsWaiting(self._largest_part if self.exchanges_statistics or by_itself else 0, use)

    @torch.no_grad()
    def _finish_pass(self) -> None:
        self._small.finish()
        self._parts.finish()
        if self._average is not None:
            self._average.finish()

    def _take(self, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        if gradient.is_sparse or gradient.is_complex():
            refuse_kinds(gradient, type(self).__name__)
        if gradient.numel() <= self._small.largest:
            self._small.add(parameter, gradient)
        elif id(parameter) in self._sharded:
            self._parts.add(parameter, local_part(gradient))  # its mean was taken when it was divided
        elif self._average is None:
            self._use([parameter], [gradient], None)
        else:
            self._average.add(parameter, gradient)

    def _hand_on(self, parameter: torch.Tensor, gradient: torch.Tensor, unused: torch.Tensor | None) -> None:
        self._use([parameter], [gradient], unused)

    def _measure(self, parameters: Tensors, gradients: Tensors, unused: torch.Tensor | None) -> None:
        if len(parameters) == 1 or self._max_norm is not None or id(parameters[0]) in self._sharded:
            self._norms.add(parameters, gradients)
        else:
            self._norms.add_joint(gradients)

    def _apply(self, parameters: Tensors, gradients: Tensors, unused: torch.Tensor | None) -> None:
        self._update(parameters, gradients, either(self._leave_out, unused))

    def _measure_and_apply(self, parameters: Tensors, gradients: Tensors, unused: torch.Tensor | None) -> None:
        self._measure(parameters, gradients, unused)
        bad = self._norms.are_bad(parameters, self._sharded) if self._skips() == "skip_tensor" else None
        self._update(parameters, gradients, either(bad, unused))

    def _update(self, parameters: Tensors, gradients: Tensors, leave_out: torch.Tensor | None) -> None:
        if id(parameters[0]) in self._sharded:
            flags = [None] * len(parameters) if leave_out is None else leave_out.expand(len(parameters)).unbind()
            self.update_parts(parameters, gradients, self._factor, list(flags))
        else:
            self.update_all(parameters, gradients, self._factor, leave_out)

    def _skips(self) -> str | None:
        """Return what is left out where a gradient is not finite."""
        return self._nonfinite or (self.nonfinite_unscaled if self._scale is None else "skip_step")

    def _note_norm(self) -> torch.Tensor:
        norm = self._norms.total(self._hooked, self._sharded)
        self._norm = norm = norm if self._scale is None else norm / self._scale
        self.found_inf = (~norm.isfinite()).to(torch.float32)
        return norm

    def _decide(self) -> None:
        """Say by what the gradients are multiplied, and whether they are applied at all."""
        norm = self._note_norm()
        factor = None if self._scale is None else self._scale.reciprocal()
        if self._max_norm is not None:
            coefficient = (self._max_norm / (norm + 1e-6)).clamp_(max=1.0)
            factor = coefficient if factor is None else coefficient * factor
        self._factor = factor
        # Also where single tensors were to be left out: there is no coefficient for the others.
        self._leave_out = None if self._skips() is None else ~norm.isfinite()
        if self._bad_loss is not None:
            bad, self._bad_loss = self._bad_loss.to(torch.int32), None
            anywhere = bad if self._world_size == 1 else self._collectives.sum(bad)
            self._leave_out = either(self._leave_out, (anywhere > 0).to(norm.device))

    # Several micro-batches in a step

    def _store(self, loss: torch.Tensor) -> None:
        if not self._num_stored:
            self._attach(loss)
            if any(p.grad is not None for p in self._hooked):
                raise RuntimeError(
                    "parameters hold gradients that this step's backward passes did not make; call zero_grad() after "
                    "a plain loss.backward(), or optimizer.backward(loss) in its place"
                )
        self._num_stored += 1
        self.num_passes += 1
        loss.backward()

    @torch.no_grad()
    def _apply_stored(self) -> None:
        """Apply what the step's micro-batches have left in `.grad`: as all of it is there, no second pass is needed."""

        def keep(parameters: Tensors, gradients: Tensors, unused: torch.Tensor | None) -> None:
            self._measure(parameters, gradients, unused)
            stored.append((parameters, gradients, unused))

        stored: list[tuple[Tensors, Tensors, torch.Tensor | None]] = []
        self._num_stored = 0
        self._begin_pass(keep)
        for parameter in reversed(self._hooked):
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
            raise RuntimeError(words.second_backward(name))
        if not last and self._accumulate == "refuse":
            raise ValueError(words.refuse_accumulation(name, self.ordinary))
        if self._collectives is None and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            raise RuntimeError(words.unknown_ranks(name, dist.get_world_size()))
