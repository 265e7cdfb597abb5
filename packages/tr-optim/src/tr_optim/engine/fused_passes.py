"""Make backward passes that measure or apply gradients one by one, and free them.

Small gradients and parts of gradients are queued, and several are used at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from tr_optim.engine.averaging import RankAverage
from tr_optim.engine.backward_norms import BackwardNorms, clip_coefficient, logical_or
from tr_optim.engine.fused_checks import check_dense_and_real, check_settings
from tr_optim.engine.hooks import BackwardPass
from tr_optim.engine.precision import CountedRounding
from tr_optim.engine.shards import Shards, local_part, sharded_parameters

Tensors = list[torch.Tensor]
Use = Callable[[Tensors, Tensors, torch.Tensor | None], None]


def flags(leave_out: torch.Tensor | None, count: int) -> list[torch.Tensor | None]:
    """Return a flag for each of several parameters, of one for all or of one for each; None is False for all."""
    return [None] * count if leave_out is None else list(leave_out.expand(count).unbind())


class ShardQueue:
    """Queue parts of gradients whose statistics over ranks are exchanged together.

    Parts wait until they have as many numbers as the largest parameter. That depends on shapes only, so all ranks
    exchange the same at the same time. The queue takes no more memory than one more gradient.

    Args:
        largest: numbers of the largest parameter.
        use: called with parameters, this rank's parts of their gradients, and None.
    """

    def __init__(self, largest: int, use: Use) -> None:
        self._largest, self._use = largest, use
        self._parameters: Tensors = []
        self._gradients: Tensors = []
        self._count = 0

    def add(self, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        """Add this rank's part of a gradient."""
        self._parameters.append(parameter)
        self._gradients.append(gradient)
        self._count += parameter.numel()  # of the whole: the same on all ranks
        if self._count >= self._largest:
            self.finish()

    def finish(self) -> None:
        """Use those that wait."""
        parameters, gradients = self._parameters, self._gradients
        self._parameters, self._gradients, self._count = [], [], 0
        if parameters:
            self._use(parameters, gradients, None)


class SmallGradientQueue:
    """Queue small gradients; used alone, each would need as many calls as a large one.

    Args:
        group_of: the groups of parameters, by their ids.
        use: called with parameters of one group, dtype and device, their gradients, and None or one flag for each.
        by_shape: whether those that are used together have one shape too.
    """

    def __init__(self, group_of: Mapping[int, Any], use: Use, *, by_shape: bool) -> None:
        self._group_of, self._use, self._by_shape = group_of, use, by_shape
        self._waiting: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._unused: dict[int, torch.Tensor] = {}
        self._count = 0

    def add(self, parameter: torch.Tensor, gradient: torch.Tensor, unused: torch.Tensor | None, size: int) -> None:
        """Take a gradient of `size` numbers.

        `unused` is whether no rank's loss uses its parameter; None if this rank's does.
        """
        self._waiting.append((parameter, gradient))
        if unused is not None:
            self._unused[id(parameter)] = unused
        self._count += size
        if self._count >= _WAITING or len(self._waiting) == _JOINED_AT_A_TIME:
            self.finish()

    def finish(self) -> None:
        """Use those that wait."""
        alike: dict[Any, tuple[Tensors, Tensors]] = {}
        for parameter, gradient in self._waiting:
            shape = gradient.shape if self._by_shape else None
            kind = (id(self._group_of[id(parameter)]), gradient.dtype, gradient.device, shape)
            found = alike.get(kind)
            if found is None:
                found = alike[kind] = ([], [])
            found[0].append(parameter)
            found[1].append(gradient)
        flags, self._waiting, self._unused, self._count = self._unused, [], {}, 0
        for parameters, gradients in alike.values():
            unused = None
            if flags and any(id(parameter) in flags for parameter in parameters):
                used = torch.zeros((), dtype=torch.bool, device=gradients[0].device)
                unused = torch.stack([flags.get(id(parameter), used) for parameter in parameters])
            self._use(parameters, gradients, unused)


# Gradients of so few elements are used together: at most so many, and no more once they have so many elements in all.
_JOINED, _JOINED_AT_A_TIME, _WAITING = 2**13, 128, 2**17


class FusedPasses(Optimizer):
    """The backward passes of `FusedOptimizer`; see there for the arguments.

    Attributes:
        nonfinite_unscaled: meaning of `nonfinite=None` without a loss scale; None applies all gradients.
        takes_shards: whether it can update sharded parameters, of which each rank holds some rows.
        stacks_shapes: whether `update_all` takes parameters of one shape only.
        exchanges_statistics: whether it needs statistics of whole sharded parameters (see `update_parts`).
        name: its name in training arguments.
        ordinary: name of an optimizer that does the same with ordinary gradients.
    """

    name = ordinary = ""
    nonfinite_unscaled: str | None = None
    takes_shards = exchanges_statistics = stacks_shapes = False

    def __init__(
        self,
        params: Iterable[torch.Tensor] | Iterable[dict[str, Any]],
        defaults: dict[str, Any],
        *,
        clip_grad_norm: float | None,
        clip_grad_value: float | None,
        accumulate: str,
        nonfinite: str | None,
        rounding_seed: int | None = None,
    ) -> None:
        check_settings(clip_grad_norm, clip_grad_value, accumulate, nonfinite)
        super().__init__(params, defaults)
        self._max_norm, self._max_value = clip_grad_norm, clip_grad_value
        self._accumulate, self._nonfinite, self._rounding_seed = accumulate, nonfinite, rounding_seed
        self._begin_anew()

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes of a copy: without hooks, ranks and gradients of a step."""
        names = ("_max_norm", "_max_value", "_accumulate", "_nonfinite", "_rounding_seed")
        return {**super().__getstate__(), **{name: vars(self)[name] for name in names}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Become a copy."""
        super().__setstate__(state)
        if "_backward_pass" not in vars(self):
            self._begin_anew()

    def _begin_anew(self) -> None:
        self._rounding = CountedRounding(self, self._rounding_seed)
        self._collectives: Any = None
        self._world_size = 1
        self._average: RankAverage | None = None
        self._backward_pass = BackwardPass((), self._take)
        self._sharded: dict[int, Shards] = {}
        self._largest_part, self._largest_joined = 0, _JOINED
        self._group_of: dict[int, dict[str, Any]] = {}
        self._is_applied, self._num_stored = False, 0
        self._norms = BackwardNorms((), {})
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
            parameter: is changed in place, not through `.data`.
            gradient: its gradient, which may be changed.
            factor: factor of the gradient, a scalar on the device; None for 1.
            leave_out: scalar on the device; if it is True nothing changes, bit for bit. None for False.
        """
        raise NotImplementedError

    def update_all(
        self, parameters: Tensors, gradients: Tensors, factor: torch.Tensor | None, leave_out: torch.Tensor | None
    ) -> None:
        """Apply gradients to parameters of one group, dtype and device; `leave_out` may have a flag for each.

        If `stacks_shapes`, they have one shape.
        """
        for parameter, gradient, leave_it in zip(parameters, gradients, flags(leave_out, len(parameters)), strict=True):
            self.update(parameter, gradient, factor, leave_it)

    def update_parts(
        self,
        parameters: Tensors,
        gradients: Tensors,
        factor: torch.Tensor | None,
        leave_out: list[torch.Tensor | None],
    ) -> None:
        """Apply this rank's parts of gradients to its parts of the parameters. Collective, for the same parameters."""
        for parameter, gradient, leave_it in zip(parameters, gradients, leave_out, strict=True):
            self.update(parameter, gradient, factor, leave_it)

    def detach(self) -> None:
        """Remove the hooks from the parameters; the next `backward` adds them again."""
        self._backward_pass.forget()

    # One backward pass

    def _attach(self, loss: torch.Tensor) -> None:
        trainable = [p for group in self.param_groups for p in group["params"] if p.requires_grad]
        if self._backward_pass.are_on(trainable):
            return
        self.detach()
        instead = (
            "and statistics of whole parameters over parts are not built; train with replicas (strategy='ddp'), or "
            f"with {self.ordinary}"
        )
        takes, name = self.takes_shards, type(self).__name__
        self._sharded = sharded_parameters(trainable, name, takes=takes, instead=instead)
        self._largest_part = max((p.numel() for p in trainable if id(p) in self._sharded), default=0)
        self._norms = BackwardNorms(trainable, self._sharded)
        self._backward_pass.put_on(loss, trainable, trainable)
        self._average = None
        replicated = [p for p in trainable if id(p) not in self._sharded]
        if self._world_size > 1 and replicated:
            self._average = RankAverage(self._collectives, replicated, self._hand_on)

    def _pass(self, loss: torch.Tensor, use: Any, *, then_another: bool = False) -> None:
        """Make a backward pass and use its gradients; if another follows, it computes those of other parameters."""
        self._begin_pass(use)
        self.num_passes += 1
        try:
            self._backward_pass.run(loss, then_another=then_another)
            self._finish_pass()
        except BaseException:
            self.detach()  # what it holds of this pass is of no use to the next
            raise

    def _begin_pass(self, use: Any) -> None:
        self._use = use
        self._norms.begin()
        # Ranks join what they have in one order.
        self._largest_joined = _JOINED if self._average is None else min(_JOINED, self._average.largest_in_order)
        by_shape = self.stacks_shapes or self._skips() == "skip_tensor"
        self._small = SmallGradientQueue(self._group_of, use, by_shape=by_shape)
        # Where single tensors are left out, all ranks ask at the same time whether a part is not finite.
        together = self.exchanges_statistics or self._skips() == "skip_tensor"
        self._parts = ShardQueue(self._largest_part if together else 0, use)

    @torch.no_grad()
    def _finish_pass(self) -> None:
        self._parts.finish()
        if self._average is not None:
            self._average.finish()
        self._small.finish()

    def _take(self, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        if gradient.is_sparse or gradient.is_complex():
            check_dense_and_real(gradient, type(self).__name__)
        if id(parameter) in self._sharded:
            self._parts.add(parameter, local_part(gradient))  # its mean was taken when it was divided
        elif self._average is None:
            self._hand_on(parameter, gradient, None)
        else:
            self._average.add(parameter, gradient)

    def _hand_on(self, parameter: torch.Tensor, gradient: torch.Tensor, unused: torch.Tensor | None) -> None:
        size = gradient.numel()
        if size <= self._largest_joined:
            self._small.add(parameter, gradient, unused, size)
        else:
            # Small gradients that lie between large ones keep the allocator from joining what these leave behind.
            self._small.finish()
            self._use([parameter], [gradient], unused)

    def _measure(self, parameters: Tensors, gradients: Tensors, unused: torch.Tensor | None) -> None:
        if len(parameters) == 1 or self._max_norm is not None or id(parameters[0]) in self._sharded:
            self._norms.add(parameters, gradients)
        else:
            self._norms.add_joint(parameters, gradients)

    def _apply(self, parameters: Tensors, gradients: Tensors, unused: torch.Tensor | None) -> None:
        self._update(parameters, gradients, logical_or(self._leave_out, unused))

    def _measure_and_apply(self, parameters: Tensors, gradients: Tensors, unused: torch.Tensor | None) -> None:
        bad = None
        if self._skips() != "skip_tensor":
            self._measure(parameters, gradients, unused)
        elif id(parameters[0]) in self._sharded or len(parameters) == 1:
            self._norms.add(parameters, gradients)
            bad = self._norms.are_bad(parameters, self._sharded)
        else:
            bad = ~self._norms.add_alike(parameters, gradients).isfinite()
        self._update(parameters, gradients, logical_or(bad, unused))

    def _update(self, parameters: Tensors, gradients: Tensors, leave_out: torch.Tensor | None) -> None:
        device = gradients[0].device  # a model may be divided over several
        factor = None if self._factor is None else self._factor.to(device)
        leave_out = None if leave_out is None else leave_out.to(device)
        if id(parameters[0]) in self._sharded:
            self.update_parts(parameters, gradients, factor, flags(leave_out, len(parameters)))
        else:
            self.update_all(parameters, gradients, factor, leave_out)

    def _skips(self) -> str | None:
        """Return what is skipped if a gradient is not finite."""
        return self._nonfinite or (self.nonfinite_unscaled if self._scale is None else "skip_step")

    def _note_norm(self) -> torch.Tensor:
        norm = self._norms.total(self._backward_pass.parameters, self._sharded)
        self._norm = norm = norm if self._scale is None else norm / self._scale
        self.found_inf = (~norm.isfinite()).to(torch.float32)
        return norm

    def _decide(self) -> None:
        """Compute the factor of the gradients, and whether they are applied at all."""
        norm = self._note_norm()
        factor = None if self._scale is None else self._scale.reciprocal()
        if self._max_norm is not None:
            coefficient = clip_coefficient(norm, self._max_norm)
            factor = coefficient if factor is None else coefficient * factor
        self._factor = factor
        # Also if single tensors were to be skipped, because the others have no coefficient.
        self._leave_out = None if self._skips() is None else ~norm.isfinite()
        if self._bad_loss is not None:
            bad, self._bad_loss = self._bad_loss.to(torch.int32), None
            anywhere = bad if self._world_size == 1 else self._collectives.sum(bad)
            self._leave_out = logical_or(self._leave_out, (anywhere > 0).to(norm.device))
