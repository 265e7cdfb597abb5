"""Carry what was remembered in one basis over to the next."""

from __future__ import annotations

import torch

from tr_optim.engine.shards import Shards
from tr_optim.projection.basis import Basis


class Rotation:
    """The change from one basis to another, for what lies in the coordinates of the first.

    With `C = new^T old` a first moment M becomes `C M`, and a second moment V becomes `(C * C) V`, elementwise squares,
    so that it stays positive. What lies outside the new basis is lost. The number of columns may change.

    Source: the idea of Robert et al., "LDAdam" (2024), section 3; their second moment has a correction by the first.

    Args:
        old: the basis until now.
        new: the one from now on, of the same sides.
        shards: how the parameter's rows are divided over ranks, each of which has those of the left columns, or of a
            stack whole matrices; None for a whole parameter. All ranks make it then, and ask it the same.
    """

    def __init__(self, old: Basis, new: Basis, shards: Shards | None = None) -> None:
        self._shards = shards
        self._left = None if old.left is None or new.left is None else new.left.mT @ old.left
        if shards is not None and shards.divides_matrix and self._left is not None:
            self._left = shards.sum(self._left)
        self._right = None if old.right is None or new.right is None else new.right.mT @ old.right
        self._rows = [columns.shape[-2] for columns in (new.left, new.right) if columns is not None]
        if shards is not None and shards.divides_matrix and self._left is not None:
            self._rows[0] = shards.shape[0]

    @property
    def dtype(self) -> torch.dtype:
        """What it computes in: that of the bases."""
        return next((change.dtype for change in (self._left, self._right) if change is not None), torch.float32)

    def cosine(self) -> torch.Tensor:
        """Return how alike the two subspaces are, a scalar: 1 for the same, 0 in the mean for random ones.

        It is the root of the mean squared cosine of the principal angles, `|C|^2 / r`, less the `r / m` that two random
        subspaces of m dimensions have; the mean over both sides and all matrices of a stack.
        """
        squares = []
        for change, rows in zip([c for c in (self._left, self._right) if c is not None], self._rows, strict=True):
            rank = min(change.shape[-2:])
            mean = change.square().sum(dim=(-2, -1)) / rank
            by_chance = max(change.shape[-2:]) / rows
            squares.append(((mean - by_chance) / max(1 - by_chance, 1e-6)).clamp(min=0).sqrt())
        return self._mean(torch.stack(squares)).clamp(max=1)

    def _mean(self, cosines: torch.Tensor) -> torch.Tensor:
        """Return the mean of both sides' cosines of all matrices, with the same bits on all ranks."""
        if self._shards is None:
            return cosines.mean()
        # Also of what all ranks have: by one number in the last place they could find their next bases in other steps.
        number = self._shards.count if self._shards.divides_matrix else self._shards.shape[0]
        return (self._shards.sum(cosines.sum().to(torch.float64)) / (number * len(cosines))).to(cosines.dtype)

    def first(self, moment: torch.Tensor) -> torch.Tensor:
        """Return a first moment of the projected gradient's shape."""
        if self._left is not None:
            moment = self._left @ moment
        return moment if self._right is None else moment @ self._right.mT

    def second(self, moment: torch.Tensor) -> torch.Tensor:
        """Return a second moment of the projected gradient's shape."""
        if self._left is not None:
            moment = self._left.square() @ moment
        return moment if self._right is None else moment @ self._right.square().mT

    def second_rows(self, rows: torch.Tensor) -> torch.Tensor:
        """Return means of a second moment over its columns, one for each row."""
        return rows if self._left is None else (self._left.square() @ rows.unsqueeze(-1)).squeeze(-1)

    def second_columns(self, columns: torch.Tensor) -> torch.Tensor:
        """Return means of a second moment over its rows, one for each column."""
        return columns if self._right is None else (self._right.square() @ columns.unsqueeze(-1)).squeeze(-1)
