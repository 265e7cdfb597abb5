"""Optimize by projections of gradients: after the backward pass, between its hooks and the step, or in its hooks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any

import torch
from torch.optim import Optimizer

from tr_optim.engine.applying import apply_update, basis_of, needs_basis, new_basis, prepared, random_key
from tr_optim.engine.hooks import BackwardHooks, look_first
from tr_optim.engine.norms import clip_coefficient, estimated_norm, sketch, total_norm
from tr_optim.engine.reduction import Averaging, Collectives, FixedOrder, missing_gradient
from tr_optim.engine.refusals import check_group, check_saved_state
from tr_optim.engine.settings import Engine, Place, Rule
from tr_optim.engine.window import Window, add
from tr_optim.projection.basis import Basis


class ProjectedOptimizer(Optimizer):
    """An optimizer over low-rank projections of gradients; the base of those that say how an update is made.

    Groups whose `rank` is not None are projected, unless they have `"projects": False`: matrices and stacks of
    matrices. The others are updated by the same
    rule without a projection. The state is tensors only: `step` (a float64 on the CPU), `basis_left` and/or
    `basis_right`, and what the rule remembers.

    In the modes `deferred` and `immediate` gradients are consumed by `backward`; a loop of one's own calls

        optimizer.backward(loss)             # last=False for all micro-batches of a step but the last
        optimizer.clip_grad_norm(1.0)        # if wanted; not with `immediate`
        optimizer.step()
        optimizer.zero_grad()

    Args:
        params: parameters or parameter groups.
        defaults: of a group's options, with `lr`, `weight_decay`, `rank`, `update_proj_gap`, `scale`, `proj_type`.
        rule: how a projected gradient becomes an update.
        engine: how gradients are projected.

    Attributes:
        norm_is_estimated: whether the norm that `clip_grad_norm` returned last is an estimate.
    """

    def __init__(
        self,
        params: Iterable[torch.Tensor] | Iterable[dict[str, Any]],
        defaults: dict[str, Any],
        rule: Rule,
        engine: Engine,
    ) -> None:
        self._rule, self._engine = rule, engine
        self._begin()
        super().__init__(params, defaults)

    def _begin(self) -> None:
        self.norm_is_estimated = False
        self._window = Window()
        self._averaging: Averaging | None = None
        self._hooks: BackwardHooks | None = None
        self._places: dict[int, Place] = {}
        self._order: FixedOrder | None = None
        self._is_last, self._inverse_scale = True, None

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy is made of: not the hooks, nor what is kept of an unfinished step."""
        return {**super().__getstate__(), "_rule": self._rule, "_engine": self._engine}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Become a copy."""
        super().__setstate__(state)
        if "_window" not in vars(self):
            self._begin()

    @property
    def mode(self) -> str:
        """`step`, `deferred` or `immediate`."""
        return self._engine.mode

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
        return self.mode == "deferred"

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; refuse parameters that cannot be projected."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        group.setdefault("projects", group["rank"] is not None)
        check_group(group, type(self).__name__)
        self.detach()
        self._hooks = None

    def bind(self, collectives: Collectives) -> None:
        """Take over who this process is among the others.

        Raises:
            ValueError: the mode is for one process only.
        """
        if collectives.world_size > 1 and self.mode == "immediate":
            raise ValueError(
                f"mode='immediate' is for one process, and there are {collectives.world_size}: weights would change "
                "before gradients are averaged; use mode='deferred'"
            )
        self._averaging = Averaging(collectives) if collectives.world_size > 1 and self.mode == "deferred" else None

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
                "mode='deferred'"
            )
        window = self._window
        if window.is_complete:
            raise RuntimeError(
                "backward was called after the last micro-batch of a step; call step() and zero_grad() first, or give "
                "last=False for all micro-batches of a step but the last"
            )
        window.num_micro_batches += 1
        window.is_complete = self._is_last = last
        self._inverse_scale = None if scale is None else 1 / scale
        self._places = self._read_places()
        self._order = self._fixed_order()
        if self._hooks is None:
            self._hooks = self._make_hooks(loss)
        self._hooks.run(loss if scale is None else loss * scale)
        self._finish_backward()

    @property
    @torch.no_grad()
    def found_inf(self) -> torch.Tensor:
        """1.0 where the norm of what the backward passes left is not finite, else 0.0; a scalar on the device."""
        return (~self._measure().isfinite()).float()

    def clip_to(self, max_norm: float | None) -> None:
        """Refuse to clip with `immediate`, before anything is trained.

        Raises:
            ValueError: `max_norm` is not None.
        """
        if self.updates_in_backward and max_norm is not None:
            raise ValueError(
                f"max_norm={max_norm:g} cannot be held with mode='immediate', which updates before the norm is known; "
                "use mode='deferred', or no clipping (max_grad_norm=0)"
            )

    @torch.no_grad()
    def clip_grad_norm(self, max_norm: float | None) -> torch.Tensor:
        """Scale what is kept of the step's gradients to a norm of at most `max_norm`; None measures only.

        Returns:
            The norm before, a scalar tensor; nothing is read back.

        Raises:
            ValueError: the updates are made already, with `immediate`.
        """
        self.clip_to(max_norm)
        norm = self._measure()
        if max_norm is not None:
            coefficient = clip_coefficient(norm, max_norm)
            kept = [p.grad for p, _ in self._numbered() if p.grad is not None]
            for tensor in chain(kept, self._window.projected.values()):
                tensor.mul_(coefficient.to(tensor.device))
        return norm

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Apply the gradients, or what is kept of them. Returns what `closure` returns, if one is given."""
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        window = self._window
        if window.num_micro_batches and not window.is_complete:
            raise RuntimeError("step was called before the step's last micro-batch; call backward(loss) with last=True")
        for parameter, place in self._numbered():
            if parameter in window.projected:
                self._apply(parameter, place, window.projected.pop(parameter), window.bases.pop(parameter, None))
            elif parameter.grad is not None:
                self._apply_whole(parameter, place)
        self._window = Window()
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the step's gradients and what is kept of them."""
        super().zero_grad(set_to_none)
        self._window = Window()

    def detach(self) -> None:
        """Take the hooks off the parameters."""
        if self._hooks is not None:
            self._hooks.detach()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state, as copies.

        Raises:
            ValueError: it is of other shapes or of another kind of projection.
        """
        super().load_state_dict(state_dict)
        saved_ids = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        for saved_id, (parameter, place) in zip(saved_ids, list(self._numbered()), strict=True):
            saved = state_dict["state"].get(saved_id)
            if saved is not None:
                check_saved_state(saved, parameter, place.group)
                # torch rounds a state to its parameter's dtype; that of bfloat16 weights is float32.
                self.state[parameter] = {
                    name: value.to("cpu" if name == "step" else parameter.device, copy=True)
                    for name, value in saved.items()
                }
        self._window = Window()

    def _numbered(self) -> Iterator[tuple[torch.Tensor, Place]]:
        count = sum(len(group["params"]) for group in self.param_groups if group["projects"])
        index = turn = 0
        for group in self.param_groups:
            for parameter in group["params"]:
                yield parameter, Place(group, index, turn, count)
                index += 1
                turn += group["projects"]

    def _read_places(self) -> dict[int, Place]:
        return {id(parameter): place for parameter, place in self._numbered()}

    def _make_hooks(self, loss: torch.Tensor) -> BackwardHooks:
        """Return the hooks, with what a first look at a loss's graph shows to come in several parts."""
        consumed = [p for p, place in self._numbered() if place.is_projected or self.updates_in_backward]
        repeated = look_first(loss, [p for p, _ in self._numbered()])
        return BackwardHooks(consumed, self._consume, shared=repeated)

    def _fixed_order(self) -> FixedOrder | None:
        """Return the order in which gradients are handled that are exchanged while they are."""
        if self._averaging is None:
            return None
        projected = [(p, place) for p, place in self._numbered() if place.is_projected and p.requires_grad]
        if self._engine.reduction == "whole":
            exchanged = [p for p, _ in projected]
        else:
            exchanged = [p for p, place in projected if self._finds_basis and self._is_due(p, place)]
        return FixedOrder(exchanged[::-1], self._keep)

    @property
    def _finds_basis(self) -> bool:
        """Whether it is the micro-batch in which bases are found."""
        return self._window.num_micro_batches == 1 if self._engine.refresh_from == "first" else self._is_last

    def _consume(self, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        if self._order is not None and parameter in self._order:
            self._order.put(parameter, gradient)
        else:
            self._keep(parameter, gradient)

    def _keep(self, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        """Keep of a micro-batch's gradient what the step needs."""
        place, window, engine = self._places[id(parameter)], self._window, self._engine
        gradient = prepared(parameter, gradient, self._inverse_scale)
        average = self._averaging
        if average is not None and engine.reduction == "whole":
            gradient, average = average(gradient.contiguous()), None
        is_whole = average is None and self._is_only
        is_due = place.is_projected and parameter not in window.bases and self._is_due(parameter, place)
        if is_due or not place.is_projected:
            if engine.refresh_from == "all" or not is_due:
                gradient = add(window.whole, parameter, gradient)
                if not self._is_last:
                    return
                del window.whole[parameter]
                is_whole = average is None
            if is_due:
                window.bases[parameter] = self._find(parameter, place, gradient, average)
        self._note_norm(parameter, gradient, is_whole=is_whole)
        if place.is_projected:
            basis = window.bases.get(parameter) or basis_of(self.state[parameter])
            assert basis is not None
            gradient = basis.down(gradient)
        add(window.projected, parameter, gradient)
        if self._is_last and self.updates_in_backward:
            if parameter in window.sketches:  # before the projection is used up
                window.norms[parameter], window.has_estimates = self._estimate(parameter), True
                del window.sketches[parameter]
            self._apply(parameter, place, window.projected.pop(parameter), window.bases.pop(parameter, None))

    @property
    def _is_only(self) -> bool:
        return self._is_last and self._window.num_micro_batches == 1

    def _note_norm(self, parameter: torch.Tensor, gradient: torch.Tensor, *, is_whole: bool) -> None:
        if is_whole:
            self._window.norms[parameter] = torch.linalg.vector_norm(gradient)
        else:
            add(self._window.sketches, parameter, sketch(gradient, self._engine.sketch_rows, self._key(parameter)))

    def _measure(self) -> torch.Tensor:
        """Return the norm of all gradients of the step, and note whether it is an estimate."""
        window, device = self._window, next(p for p, _ in self._numbered()).device
        norms = [torch.linalg.vector_norm(p.grad) for p, _ in self._numbered() if p.grad is not None]
        norms += [*window.norms.values(), *map(self._estimate, window.sketches)]
        self.norm_is_estimated = bool(window.sketches) or window.has_estimates
        return total_norm(norms, device)

    def _estimate(self, parameter: torch.Tensor) -> torch.Tensor:
        window = self._window
        basis = window.bases.get(parameter) or basis_of(self.state[parameter])
        assert basis is not None
        return estimated_norm(window.projected[parameter], basis, window.sketches[parameter], self._key(parameter))

    @torch.no_grad()
    def _finish_backward(self) -> None:
        """Settle what had a gradient earlier in the step and none now; at the end, average what was not exchanged."""
        window, order = self._window, self._order
        if self._is_last:
            unsettled = [*window.whole, *(window.projected if self.updates_in_backward else ())]
            for parameter in unsettled:
                if order is None or parameter not in order or order.lacks(parameter):
                    self._consume(parameter, torch.zeros_like(parameter))
        if order is not None:
            order.finish()
        if self._is_last:
            self._finish_step()

    def _finish_step(self) -> None:
        """Undo the loss's scale and average over the ranks, of what is not done yet."""
        kept = [p for p, place in self._numbered() if not place.is_projected and p.requires_grad]
        if self._inverse_scale is not None:
            for parameter in kept:
                if parameter.grad is not None:
                    parameter.grad.mul_(self._inverse_scale)
        if self._averaging is None:
            return
        window = self._window
        projected = [p for p, place in self._numbered() if place.is_projected and p.requires_grad]
        missing = [p for p in kept if p.grad is None] + [p for p in projected if p not in window.projected]
        if missing:
            raise RuntimeError(missing_gradient(missing))
        tensors = [p.grad for p in kept if p.grad is not None]
        if self._engine.reduction == "projected":
            tensors += [window.projected[p] for p in projected]
            tensors += [window.sketches[p] for p in projected]
        self._averaging.average_(tensors)

    def _apply_whole(self, parameter: torch.Tensor, place: Place) -> None:
        """Apply a gradient that is in `.grad`."""
        assert parameter.grad is not None
        gradient, basis = parameter.grad, None
        if place.is_projected and self.fused_in_backward and not gradient.is_meta:
            raise RuntimeError(
                f"a projected parameter of shape {tuple(parameter.shape)} has its gradient in .grad, which mode="
                f"{self.mode!r} does not look at; call optimizer.backward(loss) in place of loss.backward(), or use "
                "mode='step'"
            )
        gradient = prepared(parameter, gradient, None)
        if place.is_projected:
            basis = basis_of(self.state[parameter])
            fresh = self._find(parameter, place, gradient, None) if self._is_due(parameter, place) else None
            current = fresh or basis
            assert current is not None
            self._apply(parameter, place, current.down(gradient), fresh)
        else:
            self._apply(parameter, place, gradient, None)

    def _is_due(self, parameter: torch.Tensor, place: Place) -> bool:
        return needs_basis(parameter, self.state[parameter], place, self._engine)

    def _find(self, parameter: torch.Tensor, place: Place, gradient: torch.Tensor, average: Averaging | None) -> Basis:
        return new_basis(gradient, self.state[parameter], place, self._engine, average)

    def _key(self, parameter: torch.Tensor) -> tuple[int, int, int]:
        return random_key(self.state[parameter], self._places[id(parameter)], self._engine)

    def _apply(self, parameter: torch.Tensor, place: Place, gradient: torch.Tensor, fresh: Basis | None) -> None:
        state = self.state[parameter]
        apply_update(parameter, state, place, gradient, fresh, self._rule, rotates=self._engine.rotates)
