"""Optimize with projections of gradients: after the backward pass, between its hooks and the step, or in its hooks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields
from inspect import Parameter, Signature, signature
from typing import Any, ClassVar

import torch
from torch.optim import Optimizer

from tr_optim.engine.averaging import Collectives
from tr_optim.engine.backward_norms import is_summed
from tr_optim.engine.bases import Bases
from tr_optim.engine.checks import (
    all_or_nothing,
    check_group,
    check_moments,
    check_real,
    check_shards,
    checked_state_dict,
    refuse_codes,
    refuse_late_clipping,
)
from tr_optim.engine.gradient_store import GradientStore
from tr_optim.engine.memory_estimate import gradient_bytes, state_bytes
from tr_optim.engine.precision import Rounding, check_has_low_precision
from tr_optim.engine.settings import Place, Projection, Rule
from tr_optim.engine.shards import as_copies, in_layout, is_distributed, load_states, shards_of
from tr_optim.engine.updates import (
    BackProjection,
    BackProjector,
    BatchedReductions,
    Sums,
    UpdateApplier,
    prepare_gradient,
    run_closure,
)
from tr_optim.projection.layout import is_divided


class ProjectedOptimizer(Optimizer):
    """An optimizer over low-rank projections of gradients; the base of classes that define the update.

    Groups with a `rank` are projected, unless they have `"projects": False`: matrices and stacks of matrices. The
    others are updated by the same rule without a projection. The state is tensors only: `step` (a float64 on the CPU),
    `basis_left` and/or `basis_right`, and the rule's moments.

    In the modes `deferred` and `immediate`, `backward` consumes gradients; your own loop calls

        optimizer.backward(loss)             # last=False for all micro-batches of a step but the last
        optimizer.clip_grad_norm(1.0)        # if wanted; not with `immediate`
        optimizer.step()
        optimizer.zero_grad()

    Args:
        params: parameters or parameter groups.
        defaults: of a group's options beside those of the projection, with `lr` and `weight_decay`.
        rule: how a projected gradient becomes an update.
        projection: how gradients are projected.
        bases: where the bases are kept, and how they are found; as `Bases` if not given.
        returning: how a projected update changes the weights; by default it is projected back.
    """

    _takes: ClassVar[Any]
    _compat: ClassVar[str]

    def __init_subclass__(cls, **given: Any) -> None:
        """Show the arguments of the projection, with their defaults, in the signature of a class's constructor."""
        super().__init_subclass__(**given)
        if "_takes" not in vars(cls):
            return
        *own, _ = signature(cls.__init__).parameters.values()
        for each in fields(Projection):
            if each.name in cls._takes.__optional_keys__:
                own.append(Parameter(each.name, Parameter.KEYWORD_ONLY, default=each.default, annotation=each.type))
        vars(cls)["__init__"].__signature__ = Signature(own, return_annotation=None)

    def __init__(
        self,
        params: Iterable[torch.Tensor] | Iterable[dict[str, Any]],
        defaults: dict[str, Any],
        rule: Rule,
        projection: Projection,
        bases: Bases | None = None,
        returning: BackProjector | None = None,
    ) -> None:
        self._rule, self._projection = rule, projection
        self._bases, self._returning = bases or Bases(projection), returning or BackProjection()
        self._begin()
        super().__init__(params, {**defaults, **projection.group_options})
        if projection.stochastic_rounding:
            check_has_low_precision((p for group in self.param_groups for p in group["params"]), type(self).__name__)

    def _settings(self, given: Mapping[str, Any], *, needs_whole: bool = False, **own: Any) -> Projection:
        """Return the settings that keyword arguments ask for.

        Raises:
            TypeError: an argument is not known.
            ValueError: one is out of range or not available.
        """
        for name in given:
            if name not in self._takes.__optional_keys__:
                raise TypeError(f"{type(self).__name__}.__init__() got an unexpected keyword argument {name!r}")
        return Projection(**own, **given).checked(self._compat, needs_whole=needs_whole)

    def _begin(self) -> None:
        settings = self._projection
        rounding = Rounding(settings.seed if settings.stochastic_rounding else None)
        rotates, needs_whole = settings.rotate_moments, self._returning.needs_whole
        self._apply = UpdateApplier(self._rule, self._bases, self._returning, rounding, rotates=rotates)
        self._gathering = GradientStore(self, settings, self._bases, needs_whole=needs_whole)

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes of a copy: without hooks and gradients of an unfinished step."""
        own = {name: vars(self)[name] for name in ("_rule", "_projection", "_bases", "_returning")}
        return {**super().__getstate__(), **own, "_max_norm": self._gathering.max_norm}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Become a copy."""
        super().__setstate__(state)
        max_norm = vars(self).pop("_max_norm", None)
        if "_gathering" not in vars(self):
            self._begin()
            self._gathering.max_norm = max_norm

    @property
    def norm_is_estimated(self) -> bool:
        """Whether the norm that `clip_grad_norm` returned last is an estimate."""
        return self._gathering.norm_is_estimated

    @property
    def mode(self) -> str:
        """`step`, `deferred` or `immediate`."""
        return self._projection.mode

    @property
    def fused_in_backward(self) -> bool:
        """Whether gradients are consumed in the backward pass."""
        return self.mode != "step"

    @property
    def updates_in_backward(self) -> bool:
        """Whether weights change in the backward pass."""
        return self.mode == "immediate"

    @property
    def reduces_own_gradients(self) -> bool:
        """Whether this averages over the ranks itself."""
        return self.fused_in_backward

    @all_or_nothing
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; refuse parameters that cannot be projected."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        group.setdefault("projects", group["rank"] is not None)
        check_real(group["params"], type(self).__name__)
        check_group(group, type(self).__name__)
        check_shards(self.param_groups, type(self).__name__, self._projection, self._rule)
        self._gathering.renew_hooks()

    def bind(self, collectives: Collectives) -> None:
        """Set the ranks.

        The optimizer averages the gradients of whole parameters over them. Gradients of parameters under `fully_shard`
        come averaged, in every micro-batch (leave set_requires_gradient_sync on). Sums over their rows use their own
        mesh, also without this call.

        Args:
            collectives: used are `world_size` and `sum`.

        Raises:
            ValueError: the mode needs another `reduction` on several processes.
        """
        has_whole = not all(is_distributed(parameter) for parameter, _ in self.numbered())
        averages_late = self._projection.reduction != "whole" and has_whole
        if collectives.world_size > 1 and self.updates_in_backward and averages_late:
            raise ValueError(
                f"mode='immediate' with reduction={self._projection.reduction!r} is for one process, and there are "
                f"{collectives.world_size}: weights would change before projections are averaged; use mode='deferred', "
                "or reduction='whole', which averages each gradient before it is applied"
            )
        if self.fused_in_backward:
            self._gathering.bind(collectives)

    def backward(self, loss: torch.Tensor, *, last: bool = True, scale: torch.Tensor | None = None) -> None:
        """Compute the gradients of one micro-batch and consume those that are projected; all with `immediate`.

        Args:
            loss: scalar.
            last: whether it is the last micro-batch of its step.
            scale: what the loss is multiplied by, and gradients are divided by.

        Raises:
            RuntimeError: the step's last micro-batch was there already, or a parameter cannot be consumed.
        """
        if self.mode == "step":
            if scale is not None:
                raise ValueError("mode='step' leaves scaled gradients in .grad; use torch.amp.GradScaler as usual")
            loss.backward()
            return
        if scale is not None and self.updates_in_backward:
            raise ValueError(
                "mode='immediate' takes no scaled loss: an overflow would be in the weights before it is seen; use "
                f"mode={'step' if self._returning.needs_whole else 'deferred'!r}"
            )
        self._gathering.backward(loss, last=last, scale=scale)

    @property
    @torch.no_grad()
    def found_inf(self) -> torch.Tensor:
        """1.0 where the norm of what the backward passes left is not finite, else 0.0; a scalar on the device."""
        return (~self._gathering.measure().isfinite()).float()

    def clip_to(self, max_norm: float | None) -> None:
        """Set the norm to clip gradients to with `immediate`, before a step; None for no clipping.

        If updates need whole gradients, a step's last micro-batch then has two backward passes; the first measures
        them. The other modes clip in `clip_grad_norm`, without a second pass.

        Raises:
            ValueError: updates use projections, which have no exact norm with accumulation.
        """
        if not self.updates_in_backward:
            return
        if not self._returning.needs_whole:
            refuse_late_clipping(max_norm, None, can_clip=False)
        self._gathering.max_norm = max_norm

    @torch.no_grad()
    def clip_grad_norm(self, max_norm: float | None) -> torch.Tensor:
        """Scale the kept gradients of the step to a norm of at most `max_norm`; None measures only.

        Collective: it exchanges the sketch that estimates the norm.

        Returns:
            The norm before, a scalar tensor; nothing is read back.

        Raises:
            ValueError: the updates are made already, with `immediate`, and `clip_to` had not said to clip them so.
        """
        if self.updates_in_backward:
            refuse_late_clipping(max_norm, self._gathering.max_norm, can_clip=self._returning.needs_whole)
            return self._gathering.measure()
        norm = self._gathering.measure()
        if max_norm is not None:
            self._gathering.clip(norm, max_norm)
        return norm

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Apply the gradients, or their kept parts. Returns the result of `closure`, if one is given."""
        result = run_closure(closure)
        window = self._gathering.window
        if window.num_micro_batches and not window.is_complete:
            raise RuntimeError("step was called before the step's last micro-batch; call backward(loss) with last=True")
        together = BatchedReductions()
        for parameter, place in self.numbered():
            if parameter in window.projected:
                self.apply_gathered(parameter, place)
            elif parameter.grad is not None:
                together.add(parameter, self._whole_steps(parameter, place))
        together.finish()
        self._gathering.forget()
        return result

    def apply_gathered(self, parameter: torch.Tensor, place: Place) -> None:
        """Update a parameter with its gradient in the window, and remove that from the window."""
        window = self._gathering.window
        gradient, fresh = window.projected.pop(parameter), window.bases.pop(parameter, None)
        self._apply(parameter, self.state[parameter], place, gradient, fresh, window.whole.pop(parameter, None))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the step's gradients and their kept parts."""
        super().zero_grad(set_to_none)
        self._gathering.forget()

    def detach(self) -> None:
        """Remove the hooks from the parameters."""
        self._gathering.detach()

    def state_dict(self) -> dict[str, Any]:
        """Return the state, with DTensors for sharded parameters; `state` itself has this rank's parts."""
        return in_layout(super().state_dict(), self.param_groups, is_divided)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state, as copies.

        Raises:
            ValueError: its shapes, projection or optimizer are different; nothing is changed then.
        """
        complete, states = checked_state_dict(state_dict, self.param_groups, self._check_saved)
        super().load_state_dict(complete)
        load_states(self, states, as_copies, is_divided)
        self._gathering.forget()

    def _check_saved(self, saved: dict[str, Any], parameter: torch.Tensor, group: dict[str, Any]) -> None:
        if "min_8bit_size" not in self.defaults:
            refuse_codes(saved, parameter)
        self._bases.check_saved(saved, parameter, group)
        check_moments(saved, parameter, group, self._rule, type(self).__name__)

    def numbered(self) -> Iterator[tuple[torch.Tensor, Place]]:
        """Yield each parameter with its place."""
        count = sum(len(group["params"]) for group in self.param_groups if group["projects"])
        index = turn = 0
        for group in self.param_groups:
            for parameter in group["params"]:
                yield parameter, Place(group, index, turn, count)
                index += 1
                turn += group["projects"]

    def expected_bytes(self, micro_batches: int = 1) -> tuple[int, int]:
        """Return the most bytes of gradients in memory during a step, and those of the state after one.

        For sharded parameters, it counts this rank's parts.
        """
        placed, needs_whole = list(self.numbered()), self._returning.needs_whole
        gradients = gradient_bytes(placed, self._projection, micro_batches, needs_whole=needs_whole)
        return gradients, state_bytes(self, type(self).step)

    def _whole_steps(self, parameter: torch.Tensor, place: Place) -> Sums:
        """Apply the gradient in `.grad`; yield tensors to sum over the ranks before it continues."""
        assert parameter.grad is not None
        gradient = parameter.grad
        if place.is_projected and self.fused_in_backward and not gradient.is_meta:
            raise RuntimeError(
                f"a projected parameter of shape {tuple(parameter.shape)} has its gradient in .grad, which mode="
                f"{self.mode!r} does not look at; call optimizer.backward(loss) in place of loss.backward(), or use "
                "mode='step'"
            )
        gradient, state = prepare_gradient(parameter, gradient, None), self.state[parameter]
        if not place.is_projected:
            yield from self._apply.steps(parameter, state, place, gradient)
            return
        fresh = None
        if self._bases.is_due(parameter, state, place):
            fresh = self._bases.find(parameter, gradient, state, place, None)
        basis = self._bases.current(parameter, state, place) if fresh is None else fresh.decoded()
        assert basis is not None
        whole = gradient if self._returning.needs_whole else None
        projected = basis.down(gradient)
        if shards_of(parameter) is not None:  # also where nothing is: what follows then meets that of the others
            yield [projected] if is_summed(parameter, basis) else []
        yield from self._apply.steps(parameter, state, place, projected, fresh, whole)
