"""Project on random directions that are made again from a seed whenever they are needed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from tr_optim.engine.bases import Bases, State
from tr_optim.engine.chunks import computing_dtype
from tr_optim.engine.reduction import Averaging
from tr_optim.engine.settings import Engine, Place
from tr_optim.engine.shards import local_part, shards_of
from tr_optim.projection.basis import Basis, projected_shape, seeded_normal, sides
from tr_optim.projection.encoded import EncodedBasis

PROJECTIONS = ("random", "svd", "subspace")


class RandomBases(Bases):
    """Bases of which the state has nothing where a group's `proj` is `random`; else found in gradients, and kept.

    The columns of a random basis are not orthonormal: each number has a variance of 1/r, so that the norm of what is
    projected is in the mean that of the gradient. They depend on the seed, the parameter's number, and
    `step // update_proj_gap` alone, so that all ranks and a resumed run have the same, and of rows that are divided
    over ranks each has its part of what is drawn for all. Devices of another kind make
    other numbers of the same seed.

    Args:
        engine: its seed, and how bases are found in gradients.
    """

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self._found = {method: Bases(replace(engine, method=method)) for method in PROJECTIONS if method != "random"}
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
        """Raise where a saved state does not fit its parameter and group.

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
            "go on with the rank and the proj_type that it was saved with, or with a new optimizer"
        )
