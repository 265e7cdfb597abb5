"""Hold the low-rank basis of a gradient, and find it by subspace iteration or singular vectors."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from tr_optim.engine.shards import Shards

PROJ_TYPES = ("std", "reverse_std", "right", "left", "full")
METHODS = ("subspace", "svd")

# Iterations that find a basis from nothing, and those that follow a gradient from the last basis.
COLD_ITERATIONS, WARM_ITERATIONS = 2, 1
# Length of the random columns that are added to those of the last basis, each of length 1, before these follow a
# gradient. Without them a small language model ended 1 % behind one with singular vectors (bench/README.md). Shorter
# ones leave more of the gradient's energy in the basis, which has 0.99 of the most with these, and helped less.
FRESH = 1.0
# Share of the old basis in every new one; see `_Exchange.iterate`.
SHIFT = 1e-4

Average = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Basis:
    """Orthonormal columns that a gradient of shape `(..., m, n)` is projected on, from one side or from both.

    Attributes:
        left: `(..., m, r)`, or None.
        right: `(..., n, r)`, or None.
    """

    left: torch.Tensor | None
    right: torch.Tensor | None

    @property
    def rank(self) -> int:
        """Number of columns."""
        side = self.left if self.left is not None else self.right
        assert side is not None
        return side.shape[-1]

    def decoded(self) -> Basis:
        """Return the basis itself; see `tr_optim.projection.encoded.EncodedBasis`."""
        return self

    def down(self, gradient: torch.Tensor) -> torch.Tensor:
        """Project: `(..., r, n)` from the left, `(..., m, r)` from the right, `(..., r, r)` from both."""
        if self.left is not None:
            gradient = self.left.mT @ gradient
        return gradient if self.right is None else gradient @ self.right

    def up(self, projected: torch.Tensor) -> torch.Tensor:
        """Project back to the gradient's own coordinates."""
        if self.left is not None:
            projected = self.left @ projected
        return projected if self.right is None else projected @ self.right.mT


def sides(shape: Sequence[int], proj_type: str) -> tuple[bool, bool]:
    """Return whether a gradient of a shape is projected from the left, and whether from the right.

    `std` projects the shorter side, the right one of a square; `reverse_std` the longer, the left one of a square;
    `left`, `right` and `full` (both) do not depend on the shape.
    """
    is_tall = shape[-2] >= shape[-1]
    if proj_type in ("std", "reverse_std"):
        right = is_tall == (proj_type == "std")
        return not right, right
    return proj_type != "right", proj_type != "left"


def projected_shape(shape: Sequence[int], rank: int, proj_type: str) -> tuple[int, ...]:
    """Return the shape of a projected gradient; a rank larger than the shorter side is that side's length."""
    rank = min(rank, *shape[-2:])
    left, right = sides(shape, proj_type)
    return (*shape[:-2], rank if left else shape[-2], rank if right else shape[-1])


def find_basis(
    gradient: torch.Tensor,
    rank: int,
    proj_type: str,
    old: Basis | None = None,
    *,
    method: str = "subspace",
    key: Sequence[object] = (0,),
    average: Average | None = None,
    shards: Shards | None = None,
    keeps_signs: bool = True,
) -> Basis:
    """Return a basis of the directions in which a gradient is largest; nothing is read from the device.

    `subspace` starts with random columns, seeded by `key`, and makes two iterations. From an old basis with random
    columns added to it, it makes one. Without the random columns, a basis reaches new directions slowly, and a run sees
    less of the space than with singular vectors. The columns follow the gradient continuously, because the triangular
    factor of each orthonormalisation has a positive diagonal. So a change by rounding in the gradient changes the basis
    by rounding. `svd` uses singular vectors.

    A gradient that is zero or not finite keeps the old basis.

    With `shards` each rank has some rows of the gradient, and finds the basis of the whole, within rounding; all ranks
    call it. Left columns are divided like the rows, and an iteration exchanges `(n, r)` sums and three small ones.
    Right columns are the same on all ranks, and an iteration exchanges `(n, r)` sums and one number. `svd` gathers the
    whole gradient of this one matrix on every rank. Of a stack each rank has whole matrices, and nothing is exchanged.

    Source: subspace iteration as in Halko, Martinsson and Tropp, "Finding structure with randomness" (2011), section
    4.5; the basis of Zhao et al., "GaLore" (2024), equation 12, with the singular vectors that it names.

    Args:
        gradient: `(..., m, n)`, in the dtype to compute in.
        rank: columns; at most the shorter side.
        proj_type: one of `PROJ_TYPES`.
        old: the basis until now.
        method: one of `METHODS`.
        key: seed of the random columns; equal on all ranks.
        average: averages a tensor over ranks with different gradients. The basis is that of their mean, which is never
            formed. Only for `subspace`.
        shards: how rows are divided, if the gradient and the old basis' left columns are this rank's rows.
        keeps_signs: with `svd`, make the largest entry of each column positive.
    """
    shape = gradient.shape if shards is None else shards.shape
    rank = min(rank, *shape[-2:])
    wants_left, wants_right = wanted = sides(shape, proj_type)
    if method == "svd":
        return _singular(gradient, rank, wanted, old, shards, keeps_signs=keeps_signs)

    def find(matrix: torch.Tensor, before: torch.Tensor | None, side: str) -> torch.Tensor:
        exchange = _Exchange(average, shards, has_rows=side == "left")
        columns, kept, iterations = exchange.start(matrix, rank, before, (*key, side))
        for _ in range(iterations):
            columns = kept = exchange.iterate(matrix, columns, kept)
        return kept

    left = find(gradient, None if old is None else old.left, "left") if wants_left else None
    right = find(gradient.mT, None if old is None else old.right, "right") if wants_right else None
    return Basis(left, right)


def fresh_columns(shape: Sequence[int], like: torch.Tensor, key: Sequence[object]) -> torch.Tensor:
    """Return the random columns that are added to old ones; the same for each matrix of a stack."""
    return seeded_normal(shape[-2:], like, (*key, "fresh")) * (FRESH * shape[-2] ** -0.5)


def seeded_normal(shape: Sequence[int], like: torch.Tensor, key: Sequence[object]) -> torch.Tensor:
    """Return standard normal numbers of a dtype and device that depend on `key` alone."""
    if like.is_meta:
        return torch.empty(shape, dtype=like.dtype, device=like.device)
    if not has_generator(like.device.type):  # drawn on the host
        return seeded_normal(shape, torch.empty(0, dtype=like.dtype), key).to(like.device)
    return torch.randn(shape, generator=seeded_generator(like, key), dtype=like.dtype, device=like.device)


@cache
def has_generator(device_type: str) -> bool:
    """Whether torch has generators for a kind of device; for XLA's, among others, it has none."""
    try:
        torch.Generator(device_type)
    except RuntimeError:
        return False
    return True


def seeded_generator(like: torch.Tensor, key: Sequence[object]) -> torch.Generator:
    """Return a generator on a tensor's device whose numbers depend on `key` alone.

    Raises:
        ValueError: torch has none for the device.
    """
    if not has_generator(like.device.type):
        raise ValueError(
            "NEFTune, stochastic rounding and sketches draw from generators of their own, which "
            f"{like.device.type.upper()} devices do not have; leave them out there"
        )
    digest = hashlib.blake2b("/".join(map(str, key)).encode(), digest_size=8).digest()
    return torch.Generator(like.device).manual_seed(int.from_bytes(digest, "big") >> 1)


class _Exchange:
    """Find the columns of one side, with the products of all ranks.

    Args:
        average: averages products over ranks with different gradients.
        shards: how the gradient's rows are divided.
        has_rows: whether the columns have the gradient's rows; otherwise what they are multiplied with first has.
    """

    def __init__(self, average: Average | None, shards: Shards | None, *, has_rows: bool) -> None:
        self._average, self._has_rows = average, has_rows
        is_matrix = shards is not None and shards.divides_matrix
        self._part = shards if has_rows or not is_matrix else None  # in a stack each rank has whole matrices
        self._add_up = shards.sum if shards is not None and is_matrix else None

    def start(
        self, matrix: torch.Tensor, rank: int, before: torch.Tensor | None, key: Sequence[object]
    ) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Return the columns to begin with, those to keep if nothing is found, and how many iterations they need."""
        rows = matrix.shape[:-1] if self._part is None else (self._part.shape[0], *matrix.shape[1:-1])
        if before is not None and before.shape[-1] == rank:
            fresh = fresh_columns((*rows, rank), matrix, key)
            own = fresh if self._part is None or self._add_up is None else self._part.part_of(fresh)
            return before + own, before, WARM_ITERATIONS
        columns = seeded_normal((*rows, rank), matrix, key)
        if self._part is not None:
            columns = self._part.part_of(columns).clone()  # the others are freed
        if before is not None:  # another rank than before: what is there is kept
            kept = min(rank, before.shape[-1])
            columns[..., :kept] = before[..., :kept]
        columns = self._orthonormal(columns)
        return columns, columns, COLD_ITERATIONS

    def iterate(self, matrix: torch.Tensor, columns: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
        """Make one subspace iteration; if it fails, or the gradient is zero, return `kept`.

        It fails on all ranks or on none, because they have the same sums.

        A small share of the old columns is added: the operator `A A^T + shift` has the same invariant subspaces as
        `A A^T`. So the columns stay independent for gradients of any rank, and the orthonormalisation neither fails nor
        turns rounding errors into directions.
        """
        inner, norm = self._of_norm_one(matrix.mT @ columns, sums_rows=self._has_rows)
        outer, _ = self._of_norm_one(matrix @ inner, sums_rows=not self._has_rows)
        found = self._orthonormal(outer.add_(columns, alpha=SHIFT))
        is_good = found.isfinite().all(dim=-1, keepdim=True).all(dim=-2, keepdim=True) & (norm > 0)
        return torch.where(is_good, found, kept)

    def _orthonormal(self, columns: torch.Tensor) -> torch.Tensor:
        return orthonormalise(columns, self._add_up if self._has_rows else None)

    def _of_norm_one(self, product: torch.Tensor, *, sums_rows: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the product of all ranks divided by its norm, and the norm.

        Args:
            product: this rank's.
            sums_rows: whether it is a sum over the gradient's rows; otherwise it has these rows.
        """
        if self._average is not None:
            product = self._average(product.contiguous())
        if self._add_up is not None and sums_rows:
            product = self._add_up(product)
        norm = torch.linalg.matrix_norm(product, keepdim=True)
        if self._add_up is not None and not sums_rows:
            norm = self._add_up(norm.to(torch.float64).square()).sqrt().to(norm.dtype)
        return product / norm.clamp(min=torch.finfo(product.dtype).tiny), norm


def orthonormalise(columns: torch.Tensor, add_up: Average | None = None) -> torch.Tensor:
    """Return an orthonormal basis of the columns' span whose triangular factor has a positive diagonal.

    Columns that are not finite or not independent give NaN, and no error. If each rank has some of the rows, `add_up`
    sums over the ranks.

    Source: CholeskyQR2, Yamamoto et al. (2015); its first Gram matrix in double precision as of Yamazaki, Tomov and
    Dongarra, "Mixed-precision Cholesky QR factorization" (2015), where the device has that.
    """
    # Which dtypes a device has, torch has no way to ask in all versions, and a Mac's is the one without this.
    wide = columns.dtype if columns.device.type == "mps" else torch.float64
    for dtype in (wide, columns.dtype):
        gram = columns.mT.to(dtype) @ columns.to(dtype)
        gram = gram if add_up is None else add_up(gram)
        factor, info = torch.linalg.cholesky_ex(gram)
        identity = torch.eye(gram.shape[-1], dtype=dtype, device=gram.device).expand_as(gram)
        inverse = torch.linalg.solve_triangular(factor, identity, upper=False)
        inverse = torch.where((info == 0)[..., None, None], inverse, torch.nan)
        columns = columns @ inverse.mT.to(columns.dtype)
    return columns


def _singular(
    gradient: torch.Tensor,
    rank: int,
    wanted: tuple[bool, bool],
    old: Basis | None,
    shards: Shards | None,
    *,
    keeps_signs: bool,
) -> Basis:
    rows = shards if shards is not None and shards.divides_matrix else None
    if rows is not None:
        whole: Any = rows.distributed(gradient, is_divided=True)
        gradient = whole.full_tensor()
    is_finite = gradient.isfinite().all(dim=-1, keepdim=True).all(dim=-2, keepdim=True)
    left, _, right = torch.linalg.svd(gradient.nan_to_num(0.0, 0.0, 0.0), full_matrices=False)

    def chosen(vectors: torch.Tensor, before: torch.Tensor | None, part: Shards | None) -> torch.Tensor:
        vectors = vectors[..., :rank]
        if keeps_signs:
            largest = vectors.abs().argmax(dim=-2, keepdim=True)
            vectors = vectors * vectors.gather(-2, largest).sign()
        if part is not None:
            vectors = part.part_of(vectors).clone()
        if before is not None and before.shape == vectors.shape:
            vectors = torch.where(is_finite, vectors, before)
        return vectors.contiguous()

    return Basis(
        chosen(left, None if old is None else old.left, rows) if wanted[0] else None,
        chosen(right.mT, None if old is None else old.right, None) if wanted[1] else None,
    )
