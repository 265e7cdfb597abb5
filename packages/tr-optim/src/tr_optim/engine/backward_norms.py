"""Compute norms of gradients, of one backward pass or of a step, and their clip coefficients.

For sharded parameters, sums and norms are added up over the ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from tr_optim.engine.gradient_window import GradientWindow
from tr_optim.engine.precision import computing_dtype
from tr_optim.engine.shards import Shards, local_part, norm_of_parts, shards_of
from tr_optim.projection.basis import Basis


def norm_of(gradient: torch.Tensor) -> torch.Tensor:
    """Return a gradient's norm, in float32 at least, because float16 overflows above 65504."""
    dtype = computing_dtype(gradient)
    # Passing the dtype that a tensor already has costs as much as a small norm.
    return torch.linalg.vector_norm(gradient, **({} if dtype == gradient.dtype else {"dtype": dtype}))


def total_norm(norms: Iterable[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Return the norm of all parts whose norms are given, as `torch.nn.utils.clip_grad_norm_` adds them up."""
    stacked = [norm.to(device) for norm in norms]
    return torch.linalg.vector_norm(torch.stack(stacked)) if stacked else torch.zeros((), device=device)


def clip_coefficient(norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """Return the factor that scales gradients of a norm to at most `max_norm`."""
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)


class BackwardNorms:
    """Compute the norm of each gradient as it comes, in float32 at least, and the total at the end.

    The norms of whole gradients have places of their own before a backward pass begins. A new small tensor for each
    would lie between the large ones of the pass, and keep the allocator from joining what these leave behind.

    Args:
        parameters: those whose gradients may be added.
        sharded: those of which each rank adds its part, by id.
    """

    def __init__(self, parameters: Iterable[torch.Tensor], sharded: Mapping[int, Shards]) -> None:
        alike: dict[tuple[torch.device, torch.dtype], list[int]] = {}
        for parameter in parameters:
            if id(parameter) not in sharded:
                alike.setdefault((parameter.device, computing_dtype(parameter)), []).append(id(parameter))
        self._places: dict[int, torch.Tensor] = {}
        self._all: list[torch.Tensor] = []
        for (device, dtype), ids in alike.items():
            self._all.append(torch.zeros(len(ids), device=device, dtype=dtype))
            self._places.update((number, self._all[-1][place]) for place, number in enumerate(ids))
        self._of: dict[int, torch.Tensor] = {}

    def begin(self) -> None:
        """Forget the gradients of another pass."""
        self._of = {}
        for norms in self._all:
            norms.zero_()

    def add(self, parameters: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]) -> None:
        """Add the norm of each parameter's gradient."""
        for parameter, gradient in zip(parameters, gradients, strict=True):
            place = self._place(parameter, gradient)
            if place is None:
                self._of[id(parameter)] = norm_of(gradient)
            else:
                torch.linalg.vector_norm(gradient, dtype=place.dtype, out=place)

    def add_alike(self, parameters: Sequence[torch.Tensor], gradients: list[torch.Tensor]) -> torch.Tensor:
        """Add the norms of several gradients of one shape, dtype and device, and return them in one tensor."""
        joined = torch.stack(gradients).view(len(gradients), -1)
        norms = torch.linalg.vector_norm(joined, dim=1, dtype=computing_dtype(joined))
        self.add(parameters[:1], [norms])
        return norms

    def add_joint(self, parameters: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]) -> None:
        """Add the joint norm of several gradients of one dtype and device, at a fixed cost for all."""
        self.add(parameters[:1], [torch.cat([gradient.reshape(-1) for gradient in gradients])])

    def _place(self, parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor | None:
        """Return the place of a gradient's norm; None if the gradient is a part, or the model was moved since."""
        place = self._places.get(id(parameter))
        has_place = place is not None and (place.device, place.dtype) == (gradient.device, computing_dtype(gradient))
        return place if has_place else None

    def are_bad(self, parameters: Sequence[torch.Tensor], sharded: Mapping[int, Shards]) -> torch.Tensor:
        """Return whether gradients that were added are not finite, on their device.

        Args:
            parameters: one; or several of which all are in `sharded`, and that all ranks ask for together.
            sharded: those of which each rank has added its part, by id.

        Returns:
            A scalar, or of parts as many flags, equal on all ranks.
        """
        norms = [self._of[i] if i in self._of else self._places[i] for i in map(id, parameters)]
        shards = sharded.get(id(parameters[0]))
        if shards is None:
            return ~norms[0].isfinite()
        return shards.sum((~torch.stack(norms).isfinite()).float()) > 0

    def total(self, parameters: Sequence[torch.Tensor], sharded: Mapping[int, Shards]) -> torch.Tensor:
        """Return the total norm. Collective if there are sharded parameters.

        Args:
            parameters: those whose gradients may have been added; their order is that of the sum, the same on all
                ranks.
            sharded: those of which each rank has added its part, by id.
        """
        parts: list[list[torch.Tensor]] = [[torch.linalg.vector_norm(norms) for norms in self._all], []]
        for parameter in parameters:  # parts of gradients, and what has no place
            if id(parameter) in self._of:
                parts[id(parameter) in sharded].append(self._of[id(parameter)])
        device = local_part(parameters[0]).device if parameters else torch.get_default_device()
        whole, shards = total_norm(parts[0], device), next(iter(sharded.values()), None)
        return whole if shards is None else torch.hypot(whole, norm_of_parts(parts[1], shards, device))


def logical_or(first: torch.Tensor | None, second: torch.Tensor | None) -> torch.Tensor | None:
    """Return the logical or of two flags, or of two sets of flags; None is False."""
    if first is None or second is None:
        return second if first is None else first
    return first | second


def sum_rows(
    window: GradientWindow, parameters: Sequence[torch.Tensor], basis_of: Callable[[torch.Tensor], Basis]
) -> None:
    """Sum the projections from the left of sharded gradients; before, each covers this rank's rows only.

    Collective; they are exchanged together.

    Args:
        window: the kept parts of the step's gradients.
        parameters: all that are projected, in the same order on all ranks.
        basis_of: the basis that a parameter has in this step.
    """
    tensors, shards = [], None
    for parameter in parameters:
        held = shards_of(parameter)
        if held is None or not held.divides_matrix or parameter not in window.projected:
            continue
        shards = held
        if is_summed(parameter, basis_of(parameter)):
            tensors.append(window.projected[parameter])
    if shards is not None:
        shards.add_up(tensors)


def is_summed(parameter: torch.Tensor, basis: Basis) -> bool:
    """Whether the projection of a gradient is a sum over ranks, each of which projects its rows."""
    shards = shards_of(parameter)
    return shards is not None and shards.divides_matrix and basis.left is not None


def projected_norm(parameter: torch.Tensor, basis: Basis, projected: torch.Tensor) -> torch.Tensor:
    """Return the norm of a projection; in shards this rank's share, the squares of all being the square of the norm."""
    shards, norm = shards_of(parameter), torch.linalg.vector_norm(projected)
    if shards is None or not is_summed(parameter, basis):
        return norm
    return norm * shards.count**-0.5  # all ranks have the same


def norm_over_ranks(
    norms: Mapping[torch.Tensor, torch.Tensor],
    rests: Sequence[torch.Tensor],
    parameters: Sequence[torch.Tensor],
    device: torch.device,
) -> torch.Tensor:
    """Return the norm of all gradients. Collective if there are sharded parameters.

    Args:
        norms: of each parameter's gradient, or of this rank's rows of it.
        rests: norms of what is not in these, of all ranks.
        parameters: all there are.
        device: where the result is to be.
    """
    shards = next(filter(None, map(shards_of, parameters)), None)
    if shards is None:
        return total_norm([*norms.values(), *rests], device)
    parts = [norm for parameter, norm in norms.items() if shards_of(parameter) is not None]
    whole = [norm for parameter, norm in norms.items() if shards_of(parameter) is None]
    return torch.hypot(total_norm([*whole, *rests], device), norm_of_parts(parts, shards, device))
