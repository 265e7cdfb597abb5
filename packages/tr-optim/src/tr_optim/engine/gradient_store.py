"""Collect over the backward passes of a step the parts of the gradients that the step needs."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any, Protocol

import torch

from tr_optim.engine.averaging import Averaging, Collectives, FixedOrder, missing_gradient
from tr_optim.engine.backward_norms import clip_coefficient, norm_of, norm_over_ranks, projected_norm, sum_rows
from tr_optim.engine.bases import Bases
from tr_optim.engine.fused_checks import refuse_unknown_ranks
from tr_optim.engine.gradient_window import SKETCH_ROWS, GradientWindow, Sketch, add_to_sum
from tr_optim.engine.hooks import BackwardPass, Consume, is_reentrant
from tr_optim.engine.settings import Place, Projection
from tr_optim.engine.shards import is_distributed, local_part, shards_of, with_own_memory
from tr_optim.engine.updates import prepare_gradient
from tr_optim.projection.basis import Basis


class Owner(Protocol):
    """The optimizer that gradients are gathered for."""

    state: Any

    def numbered(self) -> Iterator[tuple[torch.Tensor, Place]]:
        """Yield each parameter with its place."""
        ...

    def apply_gathered(self, parameter: torch.Tensor, place: Place) -> None:
        """Update a parameter with its gradient in the window, and remove that from the window."""
        ...


class GradientStore:
    """Consume gradients in backward passes, and keep the parts that the step needs.

    Args:
        owner: the optimizer.
        projection: how gradients are projected.
        bases: where the bases are.
        needs_whole: whether the gradients of projected parameters are kept too, until they are applied.

    Attributes:
        window: the kept parts of the step's gradients.
        norm_is_estimated: whether the last measured norm is an estimate.
        max_norm: norm to clip gradients to before the backward pass applies them, after a first pass that measures
            them; None for no clipping.
    """

    def __init__(self, owner: Owner, projection: Projection, bases: Bases, *, needs_whole: bool) -> None:
        self._owner, self._projection, self._bases, self._needs_whole = owner, projection, bases, needs_whole
        self.window = GradientWindow()
        self.norm_is_estimated = False
        self._averaging: Averaging | None = None
        self._is_bound = False
        self._backward_pass = BackwardPass((), self._consume)
        self._numbered: list[tuple[torch.Tensor, Place]] = []
        self._places: dict[int, Place] = {}
        self._settled: dict[int, Basis] = {}
        self._has_shards = False
        self._order: FixedOrder | None = None
        self._is_last, self._inverse_scale = True, None
        self.max_norm: float | None = None
        self._coefficient: torch.Tensor | None = None
        self._take: Consume = self._keep

    @property
    def _applies(self) -> bool:
        return self._projection.mode == "immediate"

    def bind(self, collectives: Collectives) -> None:
        """Average over the ranks, if there are several."""
        self._is_bound = True
        dtype = torch.bfloat16 if self._projection.exchange_dtype == "bfloat16" else None
        self._averaging = Averaging(collectives, dtype) if collectives.world_size > 1 else None

    def forget(self) -> None:
        """Drop the step's gradients."""
        self.window = GradientWindow()

    def detach(self) -> None:
        """Remove the hooks from the parameters."""
        self._backward_pass.detach()

    def renew_hooks(self) -> None:
        """Check the parameters again before the next backward pass."""
        self._backward_pass.forget()

    def backward(self, loss: torch.Tensor, *, last: bool, scale: torch.Tensor | None) -> None:
        """Compute the gradients of one micro-batch, and consume those that the owner consumes.

        Raises:
            RuntimeError: the step's last micro-batch was there already, or a parameter cannot be consumed.
        """
        window = self.window
        if window.is_complete:
            raise RuntimeError(
                "backward was called after the last micro-batch of a step; call step() and zero_grad() first, or give "
                "last=False for all micro-batches of a step but the last"
            )
        self._numbered = list(self._owner.numbered())
        self._places = {id(parameter): place for parameter, place in self._numbered}
        self._put_hooks_on(loss)
        window.num_micro_batches += 1
        window.is_complete = self._is_last = last
        self._inverse_scale = None if scale is None else 1 / scale
        self._coefficient = None
        if self.max_norm is not None and last:
            self._coefficient = clip_coefficient(self._measure_first(loss), self.max_norm)
        self._order = self._fixed_order(self._keep)
        self._settled = self._settle()
        self._backward_pass.run(loss if scale is None else loss * scale)
        self._finish_backward()

    def measure(self) -> torch.Tensor:
        """Return the norm of all gradients of the step, and record whether it is an estimate.

        Collective if it is an estimate and there are several ranks.
        """
        window, parameters = self.window, [p for p, _ in self._owner.numbered()]
        norms = {p: norm_of(local_part(p.grad)) for p in parameters if p.grad is not None} | window.norms
        self.norm_is_estimated, rests = window.sketch is not None, []
        if window.sketch is not None:
            norms |= {p: projected_norm(p, self._basis(p), window.projected[p]) for p in window.sketch.waiting}
            rests = self._rests(window.sketch, parameters)
        return norm_over_ranks(norms, rests, parameters, parameters[0].device)

    def _rests(self, sketch: Sketch, parameters: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return estimates of the norms outside the bases, over all ranks."""
        found, shards = [], next(filter(None, map(shards_of, parameters)), None)
        for (_, _, is_of_rows), rest in sketch.rest(self.window.projected, self._basis, self._key).items():
            if is_of_rows and shards is not None:
                rest = shards.sum(rest.clone())
            elif self._averaging is not None and self._projection.reduction == "projected":
                rest = self._averaging(rest.contiguous())
            found.append(torch.linalg.vector_norm(rest))
        return found

    def clip(self, norm: torch.Tensor, max_norm: float) -> None:
        """Scale the kept gradients of the step from a norm to at most `max_norm`."""
        coefficient, window = clip_coefficient(norm, max_norm), self.window
        kept = [local_part(p.grad) for p, _ in self._owner.numbered() if p.grad is not None]
        # The known norms are updated too, or a second call would clip again.
        sketched = {} if window.sketch is None else window.sketch.sums
        parts = (window.projected, window.whole, window.norms, sketched)
        for tensor in chain(kept, *(part.values() for part in parts)):
            tensor.mul_(coefficient.to(tensor.device))

    def _put_hooks_on(self, loss: torch.Tensor) -> None:
        """Put hooks on the currently trainable parameters, if some were frozen or unfrozen since."""
        numbered = [(p, place) for p, place in self._numbered if p.requires_grad]
        # Parts of gradients are pieces of one tensor of many parameters: one that stayed in .grad would keep them all.
        consumed = [p for p, place in numbered if place.is_projected or self._applies or is_distributed(p)]
        if self._backward_pass.are_on(consumed):
            return
        if not self._is_bound and not all(is_distributed(parameter) for parameter, _ in self._numbered):
            refuse_unknown_ranks(type(self._owner).__name__)
        self._has_shards = any(is_distributed(p) for p, _ in numbered)
        self._backward_pass.put_on(loss, consumed, [p for p, _ in numbered])

    def _measure_first(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the norm of the step's gradients, in a backward pass that applies none and keeps the graph."""
        norms: dict[torch.Tensor, torch.Tensor] = {}
        parameters = [p for p, _ in self._owner.numbered()]

        def note(parameter: torch.Tensor, gradient: torch.Tensor) -> None:
            gradient = prepare_gradient(parameter, gradient, None)
            if self._averaging is not None and not is_distributed(parameter):
                gradient = self._averaging(gradient.contiguous())
            if parameter in self.window.whole:
                gradient = gradient.add_(self.window.whole[parameter])
            norms[parameter] = torch.linalg.vector_norm(gradient)

        self._order, self._take = self._fixed_order(note), note
        self._backward_pass.are_apart = self._has_shards or is_reentrant(loss)  # checkpointing may have been turned on
        try:
            self._backward_pass.run(loss, then_another=True)
            self._supply([parameter for parameter in self.window.whole if parameter not in norms])
            if self._order is not None:
                self._order.finish()
        finally:
            self._take = self._keep
        return norm_over_ranks(norms, [], parameters, loss.device)

    def _fixed_order(self, take: Consume) -> FixedOrder | None:
        """Return the order of gradients whose handling includes an exchange."""
        if self._averaging is None:
            return None
        numbered = [(p, place) for p, place in self._owner.numbered() if p.requires_grad]
        consumed = [(p, place) for p, place in numbered if place.is_projected or self._applies]
        if self._projection.reduction == "whole" or self._applies:
            exchanged = [p for p, _ in consumed]
        else:
            finds_bases = self._is_last if self._sums_first else self.window.num_micro_batches == 1
            exchanged = [p for p, place in consumed if finds_bases and self._is_due(p, place)]
        return FixedOrder(exchanged[::-1], take)

    @property
    def _sums_first(self) -> bool:
        """Whether bases are found from the sum of all micro-batches, not from the first."""
        return self._projection.refresh_from == "all"

    def _settle(self) -> dict[int, Basis]:
        """Return the bases of parameters that keep only a norm and a projection, by their ids.

        In the usual case, one micro-batch on one process, these are all that find no basis. Deciding for all at once,
        and not in each hook, takes a third of the time.
        """
        is_usual = self._is_last and self.window.num_micro_batches == 1 and self._averaging is None
        is_coded = self._projection.basis_dtype != "float32"  # to be decoded one by one
        if not is_usual or is_coded or self._needs_whole or self._applies or self._has_shards:
            return {}
        found: dict[int, Basis] = {}
        for parameter, place in self._numbered:
            if place.is_projected and parameter.requires_grad and not self._is_due(parameter, place):
                basis = self._bases.current(parameter, self._owner.state[parameter], place)
                assert basis is not None
                found[id(parameter)] = basis
        return found

    def _consume(self, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        basis = self._settled.get(id(parameter))
        if basis is not None:
            gradient = prepare_gradient(parameter, gradient, self._inverse_scale)
            self.window.norms[parameter] = torch.linalg.vector_norm(gradient)
            self.window.projected[parameter] = basis.down(gradient)
        elif self._order is not None and parameter in self._order:
            self._order.put(parameter, gradient)
        else:
            self._take(parameter, gradient)

    def _keep(self, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        """Keep the parts of a micro-batch's gradient that the step needs."""
        place, window, projection = self._places[id(parameter)], self.window, self._projection
        gradient = prepare_gradient(parameter, gradient, self._inverse_scale)
        average = None if is_distributed(parameter) else self._averaging
        if average is not None and projection.reduction == "whole":
            gradient, average = average(gradient.contiguous()), None
        is_whole = average is None and self._is_last and window.num_micro_batches == 1
        is_due = place.is_projected and parameter not in window.bases and self._is_due(parameter, place)
        needs_sum = is_due or not place.is_projected or self._needs_whole
        if needs_sum and (not is_due or self._sums_first):
            gradient = add_to_sum(window.whole, parameter, gradient if self._is_last else with_own_memory(gradient))
            if not self._is_last:
                return
            del window.whole[parameter]
            is_whole = average is None
        self._note_norm(parameter, gradient, is_whole=is_whole)
        if self._coefficient is not None:
            gradient = gradient.mul_(self._coefficient.to(gradient.device))
        if is_due:
            state = self._owner.state[parameter]
            window.bases[parameter] = self._bases.find(parameter, gradient, state, place, average)
        if place.is_projected:
            if self._needs_whole:
                window.whole[parameter] = gradient
            gradient = self._basis(parameter).down(gradient)
        add_to_sum(window.projected, parameter, with_own_memory(gradient))
        if self._is_last and self._applies:
            if place.is_projected:
                sum_rows(window, [parameter], self._basis)
            self._take_out_of_sketch(parameter)
            self._owner.apply_gathered(parameter, place)

    def _is_due(self, parameter: torch.Tensor, place: Place) -> bool:
        return self._bases.is_due(parameter, self._owner.state[parameter], place)

    def _basis(self, parameter: torch.Tensor) -> Basis:
        """Return the basis that a projected parameter has in this step."""
        found = self.window.bases.get(parameter)
        if found is not None:
            return found.decoded()
        basis = self._bases.current(parameter, self._owner.state[parameter], self._places[id(parameter)])
        assert basis is not None
        return basis

    def _note_norm(self, parameter: torch.Tensor, gradient: torch.Tensor, *, is_whole: bool) -> None:
        if is_whole:
            self.window.norms[parameter] = torch.linalg.vector_norm(gradient)
            return
        if self.window.sketch is None:
            self.window.sketch = Sketch(SKETCH_ROWS)
        self.window.sketch.add(parameter, gradient, self._key(parameter))

    def _take_out_of_sketch(self, parameter: torch.Tensor) -> None:
        """Subtract a projection from the sketch, before it is used up."""
        window = self.window
        if window.sketch is not None and parameter in window.sketch.waiting:
            basis, projected = self._basis(parameter), window.projected[parameter]
            window.norms[parameter] = projected_norm(parameter, basis, projected)
            window.sketch.take_out(parameter, projected, basis, self._key(parameter))

    def _key(self, parameter: torch.Tensor) -> tuple[int, int, int]:
        return self._bases.random_key(self._owner.state[parameter], self._places[id(parameter)])

    @torch.no_grad()
    def _finish_backward(self) -> None:
        """Add zeros for parameters without a gradient in this pass; after the last, average what was not exchanged."""
        window, order = self.window, self._order
        self._settled = {}  # or bases would be kept longer than their states keep them
        if self._is_last:
            unsettled = [*window.whole, *(window.projected if self._applies else ())]
            # Where a projection is there too, the whole gradient waits for the update.
            self._supply([p for p in unsettled if self._applies or p not in window.projected])
        if order is not None:
            order.finish()
        if self._is_last:
            self._finish_step()

    def _supply(self, parameters: list[torch.Tensor]) -> None:
        """Add a gradient of zeros to parameters that had one earlier in the step and none now."""
        order = self._order
        for parameter in parameters:
            if order is None or parameter not in order or order.lacks(parameter):
                self._consume(parameter, torch.zeros_like(parameter))

    def _finish_step(self) -> None:
        """Divide by the loss's scale and average over the ranks, where it is not done yet."""
        if self._inverse_scale is not None:
            for parameter, place in self._numbered:
                if parameter.grad is not None and not place.is_projected and parameter.requires_grad:
                    own = local_part(parameter.grad)
                    own.mul_(self._inverse_scale.to(own.device))
        if self._averaging is None and not self._has_shards:
            return
        window = self.window
        kept = [p for p, place in self._numbered if not place.is_projected and p.requires_grad]
        projected = [p for p, place in self._numbered if place.is_projected and p.requires_grad]
        sum_rows(window, projected, self._basis)
        if self._averaging is None or self._applies:
            return
        # Sharded gradients were averaged when they were divided.
        kept, projected = ([p for p in found if not is_distributed(p)] for found in (kept, projected))
        missing = [p for p in kept if p.grad is None] + [p for p in projected if p not in window.projected]
        if missing:
            raise RuntimeError(missing_gradient(missing))
        tensors = [p.grad for p in kept if p.grad is not None]
        if self._projection.reduction == "projected":
            tensors += [window.projected[p] for p in projected]
        self._averaging.average_(tensors)
