"""Manage the bases that parameters are projected on: read them from a state, find them when due, and store them.

Random bases are not stored. They are drawn from a seed whenever they are needed.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from tr_optim.engine.averaging import Averaging
from tr_optim.engine.checks import check_saved_state
from tr_optim.engine.precision import computing_dtype
from tr_optim.engine.settings import Place, Projection
from tr_optim.engine.shards import local_part, shards_of
from tr_optim.projection.basis import Basis, find_basis, projected_shape, seeded_normal, sides
from tr_optim.projection.encoded import ENTRIES, EncodedBasis, encode, read_encoded
from tr_optim.projection.refresh import LazyRefresh, Rotation, is_due, phase

State = dict[str, Any]


class Bases:
    """The bases of projected parameters, as tensors in their states.

    Args:
        projection: how bases are found, and when.
    """

    def __init__(self, projection: Projection) -> None:
        self._projection = projection
        is_lazy = projection.refresh == "lazy"
        self._lazy = LazyRefresh(projection.refresh_cosine, projection.refresh_window) if is_lazy else None

    @property
    def measures_change(self) -> bool:
        """Whether `note_change` needs to know how a basis differs from the one before."""
        return self._lazy is not None

    def current(self, parameter: torch.Tensor, state: State, place: Place) -> Basis | None:
        """Return a parameter's basis, or None before the first and where there is no projection."""
        left, right, dtype = state.get("basis_left"), state.get("basis_right"), computing_dtype(parameter)
        some = right if left is None else left
        if some is None:
            return None
        if some.dtype == dtype:  # both are kept alike
            return Basis(left, right)
        return read_encoded(state, parameter, dtype).decoded()

    def is_due(self, parameter: torch.Tensor, state: State, place: Place) -> bool:
        """Whether a projected parameter needs a basis in this step: it has none, another rank, or its turn has come.

        Raises:
            ValueError: its state is for the other side.
        """
        group, left, right = place.group, state.get("basis_left"), state.get("basis_right")
        some = right if left is None else left
        if some is None:
            return True
        if (left is not None, right is not None) != sides(parameter.shape, group["proj_type"]):
            raise ValueError(
                f"proj_type={group['proj_type']!r} projects a parameter of shape {tuple(parameter.shape)} from another "
                "side than its state was made for; resume with the proj_type that it was saved with"
            )
        if some.shape[-1] != min(group["rank"], *parameter.shape[-2:]):
            return True
        gap = group["update_proj_gap"]
        if self._lazy is not None:
            return self._lazy.is_due(parameter, state, gap, self._phase(place))
        return is_due(int(state["step"]), gap, index=place.turn, count=place.count, staggers=self._projection.stagger)

    def find(
        self,
        parameter: torch.Tensor,
        gradient: torch.Tensor,
        state: State,
        place: Place,
        average: Averaging | None,
    ) -> Basis | EncodedBasis:
        """Return the basis of a gradient, in its stored form; with `average`, that of the mean over the ranks."""
        if self._projection.method == "svd" and average is not None:
            gradient, average = average(gradient.contiguous()), None
        basis = find_basis(
            gradient,
            place.group["rank"],
            place.group["proj_type"],
            self.current(parameter, state, place),
            method=self._projection.method,
            key=self.random_key(state, place),
            average=average,
            shards=shards_of(parameter),
            keeps_signs=self._projection.keeps_signs,
        )
        return basis if self._projection.basis_dtype == "float32" else encode(basis, self._projection.basis_dtype)

    def store(self, state: State, basis: Basis | EncodedBasis) -> None:
        """Put a basis into a state."""
        kept = encode(basis, self._projection.basis_dtype) if isinstance(basis, Basis) else basis
        for name in ENTRIES:  # also drops scales of integers that are not used any more
            state.pop(name, None)
        state.update(kept.tensors)

    def note_change(self, parameter: torch.Tensor, state: State, place: Place, rotation: Rotation | None) -> None:
        """Record a new basis: `rotation` is relative to the previous one, None for the first."""
        if self._lazy is not None:
            self._lazy.note(parameter, state, rotation, self._phase(place))

    def check_saved(self, saved: State, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        """Raise if a saved state does not fit its parameter and the projection that its group asks for.

        Raises:
            ValueError: the message says in what.
        """
        check_saved_state(saved, parameter, group)

    def random_key(self, state: State, place: Place) -> tuple[int, int, int]:
        """Return what a parameter's random numbers of this step depend on: equal on all ranks, after a resume too."""
        return self._projection.seed, place.index, int(state["step"]) if "step" in state else 0

    def _phase(self, place: Place) -> int:
        staggers = self._projection.stagger
        return phase(place.group["update_proj_gap"], index=place.turn, count=place.count, staggers=staggers)


PROJECTIONS = ("random", "svd", "subspace")


class RandomBases(Bases):
    """Bases that are not stored if a group's `proj` is `random`; others are found in gradients and stored.

    The columns of a random basis are not orthonormal. Each number has a variance of 1/r, so the projection has the
    gradient's norm on average. They depend only on the seed, the parameter's number and `step // update_proj_gap`. So
    all ranks and a resumed run have the same, and each rank has its part for sharded rows. Devices of different kinds
    draw different numbers from the same seed.

    Args:
        projection: its seed, and how bases are found in gradients.
    """

    def __init__(self, projection: Projection) -> None:
        super().__init__(projection)
        self._found = {
            method: Bases(replace(projection, method=method)) for method in PROJECTIONS if method != "random"
        }
        self._last: tuple[object, Basis] | None = None  # one update asks twice

    def current(self, parameter: torch.Tensor, state: State, place: Place) -> Basis | None:
        """Return a parameter's basis, or None before the first one is found and where there is no projection.

        Raises:
            ValueError: its state is for another rank or side.
        """
        if not _is_random(place.group):
            return super().current(parameter, state, place)
        group, shape, shards = place.group, parameter.shape, shards_of(parameter)
        rank = min(group["rank"], *shape[-2:])
        has_left, _ = sides(shape, group["proj_type"])
        expected = projected_shape(shape, rank, group["proj_type"])
        if shards is not None and not (shards.divides_matrix and has_left):
            expected = (shards.stop - shards.start, *expected[1:])
        _check_moments(state, shape, expected, group)
        seed, index, step = self.random_key(state, place)
        key = (seed, index, "basis", step // group["update_proj_gap"])
        like = local_part(parameter).new_empty(0, dtype=computing_dtype(parameter))
        columns = (*shape[:-2], shape[-2] if has_left else shape[-1], rank)
        made = (key, columns, has_left, like.dtype, like.device)
        if self._last is None or self._last[0] != made:
            numbers = seeded_normal(columns, like, key).div_(rank**0.5)
            if shards is not None and (has_left or not shards.divides_matrix):
                numbers = shards.part_of(numbers).clone()  # the others are freed
            self._last = made, Basis(numbers, None) if has_left else Basis(None, numbers)
        return self._last[1]

    def is_due(self, parameter: torch.Tensor, state: State, place: Place) -> bool:
        """Whether a projected parameter finds a basis in its gradient in this step."""
        return not _is_random(place.group) and super().is_due(parameter, state, place)

    def find(
        self, parameter: torch.Tensor, gradient: torch.Tensor, state: State, place: Place, average: Averaging | None
    ) -> Basis | EncodedBasis:
        """Return the basis of a gradient."""
        return self._found[place.group["proj"]].find(parameter, gradient, state, place, average)

    def check_saved(self, saved: State, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        """Raise if a saved state does not fit its parameter and group.

        Raises:
            ValueError: the message says in what.
        """
        if not _is_random(group):
            super().check_saved(saved, parameter, group)
            return
        bases = [name for name in ("basis_left", "basis_right") if name in saved]
        if bases:
            raise ValueError(
                f"the saved optimizer state of a parameter of shape {tuple(parameter.shape)} has {' and '.join(bases)},"
                " and proj='random' keeps none; resume with the optimizer and the proj that it was saved with"
            )
        expected = projected_shape(parameter.shape, group["rank"], group["proj_type"])
        _check_moments(saved, parameter.shape, expected, group)


def _is_random(group: dict[str, Any]) -> bool:
    return group["projects"] and group["proj"] == "random"


def _check_moments(state: State, shape: torch.Size, expected: tuple[int, ...], group: dict[str, Any]) -> None:
    found = tuple(state["exp_avg"].shape) if "exp_avg" in state else expected
    if found != expected:
        rank, proj_type = min(group["rank"], *shape[-2:]), group["proj_type"]
        raise ValueError(
            f"the state of a parameter of shape {tuple(shape)} has moments of shape {found}, and rank={rank} with "
            f"proj_type={proj_type!r} needs {expected}: moments of random directions cannot be carried over to others; "
            "resume with the rank and the proj_type that it was saved with, or with a new optimizer"
        )
