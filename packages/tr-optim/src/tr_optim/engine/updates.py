"""Apply a parameter's gradient, or its projection, to the parameter and its state.

The update of a projected gradient is projected back to the weights. Updates that need sums over ranks are made
together, so that one exchange serves many.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Protocol

import torch

from tr_optim.engine.bases import Bases, State
from tr_optim.engine.checks import check_gradient
from tr_optim.engine.precision import Rounding, chunks, computing_dtype, store_rounded
from tr_optim.engine.settings import Place, RowRule, Rule
from tr_optim.engine.shards import Shards, local_part, shards_of
from tr_optim.projection.basis import Basis
from tr_optim.projection.encoded import EncodedBasis
from tr_optim.projection.refresh import Rotation

# An update, or a part of one, yields tensors; they are replaced by their sums over ranks before it continues.
Sums = Generator[list[torch.Tensor]]

# Updates wait for each other until this rank's parts of their gradients have so many numbers.
_TOGETHER = 2**22


def run_closure(closure: Callable[[], Any] | None) -> Any:
    """Return the result of a step's closure, which computes the loss and its gradients; None without one."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def run_updates(updates: Sequence[Sums], shards: Shards | None) -> None:
    """Run updates to their ends. Collective: updates of the same parameters in the same order.

    Args:
        updates: updates that have not started.
        shards: sums over the ranks; None if there is nothing to sum.
    """
    going = list(updates)
    while going:
        given = [(update, next(update, None)) for update in going]
        going = [update for update, tensors in given if tensors is not None]
        tensors = list(chain.from_iterable(tensors or () for _, tensors in given))
        if tensors and shards is not None:
            shards.add_up(sorted(tensors, key=lambda tensor: tensor.itemsize))  # those of a dtype share an exchange


class BatchedReductions:
    """Queue updates of sharded parameters for joint exchanges; updates of whole parameters are made at once.

    The queue depends on shapes only, so all ranks exchange the same at the same time. It takes no more memory than the
    update of one more gradient, or 16 MiB of float32 numbers for each such tensor.
    """

    def __init__(self) -> None:
        self._waiting: list[Sums] = []
        self._shards: Shards | None = None
        self._count = 0

    def add(self, parameter: torch.Tensor, update: Sums) -> None:
        """Add a parameter's update."""
        shards = shards_of(parameter)
        if shards is None:
            run_updates([update], None)
            return
        self._shards = shards
        self._waiting.append(update)
        self._count += -(-parameter.numel() // shards.count)
        if self._count >= _TOGETHER:
            self.finish()

    def finish(self) -> None:
        """Run the waiting updates."""
        waiting, self._waiting, self._count = self._waiting, [], 0
        run_updates(waiting, self._shards)


@dataclass(slots=True)
class ProjectedUpdate:
    """An update of a projected gradient, and what it takes to subtract it from the weights.

    Attributes:
        weights: `(..., m, n)`, in the computing dtype.
        update: the rule's update of the projected gradient, times the learning rate; it may be changed.
        basis: the basis that the gradient was projected on.
        group: the parameter's group.
        state: the parameter's state.
        projected: the projected gradient; None unless `needs_whole`.
        whole: the gradient; None unless `needs_whole`. It may be changed.
        parts: how rows are divided, if `weights` and other tensors have this rank's rows; None if they have all.
    """

    weights: torch.Tensor
    update: torch.Tensor
    basis: Basis
    group: dict[str, Any]
    state: dict[str, Any]
    projected: torch.Tensor | None
    whole: torch.Tensor | None
    parts: Shards | None


class BackProjector(Protocol):
    """How a projected update changes the weights.

    Attributes:
        needs_whole: whether it needs the gradient itself too, which is then kept until the update is applied.
    """

    needs_whole: bool

    def subtract(self, made: ProjectedUpdate) -> Sums:
        """Subtract an update from the weights, in place; yield tensors to sum over the ranks before that."""
        ...


class BackProjection:
    """The update, projected back, times `scale`: GaLore's."""

    needs_whole = False

    def subtract(self, made: ProjectedUpdate) -> Sums:
        """Subtract without a second matrix of the weights' size, and without sums over ranks."""
        yield from ()
        weights, basis = made.weights, made.basis
        update = made.update.mul_(made.group["scale"])
        multiply = weights.addmm_ if weights.dim() == 2 else weights.baddbmm_
        if basis.left is not None and basis.right is not None:
            multiply(basis.left @ update, basis.right.mT, alpha=-1)
        elif basis.left is not None:
            multiply(basis.left, update, alpha=-1)
        elif basis.right is not None:
            multiply(update, basis.right.mT, alpha=-1)


def prepare_gradient(
    parameter: torch.Tensor, gradient: torch.Tensor, inverse_scale: torch.Tensor | None
) -> torch.Tensor:
    """Return a gradient in the computing dtype, divided by its loss's scale; refuse kinds that are not projected.

    For a sharded parameter, return this rank's part.
    """
    check_gradient(parameter, gradient)
    gradient, dtype = local_part(gradient), computing_dtype(parameter)
    if gradient.dtype != dtype:
        gradient = gradient.to(dtype)
    return gradient if inverse_scale is None else gradient.mul_(inverse_scale.to(gradient.device))


class UpdateApplier:
    """Compute and apply updates.

    Args:
        rule: computes the update of a (projected) gradient.
        bases: where the bases are.
        returning: how a projected update changes the weights.
        rounding: how weights of low precision are rounded.
        rotates: whether moments are rotated to a new basis.
    """

    def __init__(
        self, rule: Rule, bases: Bases, returning: BackProjector, rounding: Rounding, *, rotates: bool
    ) -> None:
        self._rule, self._bases, self._returning, self._rotates = rule, bases, returning, rotates
        self._rounding = rounding

    def __call__(
        self,
        parameter: torch.Tensor,
        state: State,
        place: Place,
        gradient: torch.Tensor,
        fresh: Basis | EncodedBasis | None = None,
        whole: torch.Tensor | None = None,
    ) -> None:
        """Update a parameter and its state. Collective on the ranks that have rows of it."""
        run_updates([self.steps(parameter, state, place, gradient, fresh, whole)], shards_of(parameter))

    def steps(
        self,
        parameter: torch.Tensor,
        state: State,
        place: Place,
        gradient: torch.Tensor,
        fresh: Basis | EncodedBasis | None = None,
        whole: torch.Tensor | None = None,
    ) -> Sums:
        """Update a parameter and its state; yield tensors to sum over the ranks before it continues.

        Args:
            parameter: the parameter to update.
            state: its state, empty before the first update; that of an empty parameter stays so.
            place: its group.
            gradient: its gradient, or the projection; it may be changed.
            fresh: the basis from now on; None keeps the one in `state`.
            whole: the gradient of a projected parameter, where `returning` needs it; it may be changed.
        """
        if "step" not in state:
            if parameter.numel() == 0:
                return
            state["step"] = torch.zeros((), dtype=torch.float64)  # on the CPU, where reading it costs nothing
            basis = self._bases.current(parameter, state, place) if fresh is None else fresh.decoded()
            self._rule.start(state, gradient, place.group, _divided(parameter, basis))
        if fresh is not None:
            self._change_basis(parameter, state, place, fresh)
        basis = self._bases.current(parameter, state, place)  # that of the gradient, which may depend on the step
        state["step"] += 1
        generator = self._rounding.generator(parameter, place.index, state["step"])
        shards, parameter = shards_of(parameter), local_part(parameter)
        if basis is None and self._rule.is_elementwise:
            update_in_pieces(self._rule, parameter, state, place.group, gradient, generator)
        else:
            how = {"generator": generator, "shards": shards}
            yield from self._update(parameter, state, place.group, gradient, basis, whole, **how)

    def _change_basis(self, parameter: torch.Tensor, state: State, place: Place, fresh: Basis | EncodedBasis) -> None:
        old = self._bases.current(parameter, state, place)
        rotation = None
        if old is not None:
            turns = self._rotates or old.rank != fresh.rank
            if turns or self._bases.measures_change:
                rotation = Rotation(old, fresh.decoded(), shards_of(parameter))
            if turns and rotation is not None:
                self._rule.rotate(state, rotation)
        self._bases.store(state, fresh)
        self._bases.note_change(parameter, state, place, rotation)

    def _update(
        self,
        parameter: torch.Tensor,
        state: State,
        group: dict[str, Any],
        gradient: torch.Tensor,
        basis: Basis | None,
        whole: torch.Tensor | None,
        *,
        generator: torch.Generator | None,
        shards: Shards | None,
    ) -> Sums:
        rule, decay = self._rule, group["weight_decay"]
        weights = parameter.to(computing_dtype(parameter))  # the parameter itself, unless it is of low precision
        if shards is not None and isinstance(rule, RowRule):
            has_rows = not shards.divides_matrix or basis is None or basis.left is None
            update, rate = rule.update_rows(gradient, state, group, weights, shards, has_rows=has_rows)
        else:
            update, rate = rule.update(gradient, state, group, weights)
        if decay and not rule.decays_after:
            weights.mul_(1 - rate * decay)
        if basis is None:
            weights.sub_(update)
        else:
            projected = gradient if self._returning.needs_whole else None
            parts = shards if shards is not None and shards.divides_matrix else None
            made = ProjectedUpdate(weights, update, basis, group, state, projected, whole, parts)
            yield from self._returning.subtract(made)
        if decay and rule.decays_after:
            weights.mul_(1 - rate * decay)
        if weights is not parameter:
            store_rounded(parameter, weights, generator)


def update_in_pieces(
    rule: Rule,
    parameter: torch.Tensor,
    state: State,
    group: dict[str, Any],
    gradient: torch.Tensor,
    generator: torch.Generator | None = None,
) -> None:
    """Update by an elementwise rule, without a second tensor of the parameter's size, which may be an embedding.

    Args:
        rule: computes the update; `is_elementwise`.
        parameter: to update, or this rank's part of it.
        state: its state, whose step is counted already.
        group: its group.
        gradient: of the parameter's shape.
        generator: rounds weights of low precision stochastically; None rounds to nearest.
    """
    decay, names = group["weight_decay"], [name for name in state if name != "step"]
    for piece, gradient_piece, *moments in chunks(parameter, gradient, *(state[name] for name in names)):
        own = {"step": state["step"], **dict(zip(names, moments, strict=True))}
        weights = piece.to(computing_dtype(parameter))
        update, rate = rule.update(gradient_piece.to(weights.dtype), own, group, weights)
        if decay and not rule.decays_after:
            weights.mul_(1 - rate * decay)
        weights.sub_(update)
        if decay and rule.decays_after:
            weights.mul_(1 - rate * decay)
        if weights is not piece:
            store_rounded(piece, weights, generator)


def _divided(parameter: torch.Tensor, basis: Basis | None) -> Shards | None:
    """Return how the rows of a parameter's (projected) gradients are divided; None if all ranks have the same."""
    shards = shards_of(parameter)
    if shards is None or basis is None or not shards.divides_matrix:
        return shards
    return None if basis.left is not None else shards
