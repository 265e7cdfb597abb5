"""Carry what was remembered in one basis over to the next."""

from __future__ import annotations

import torch

from tr_optim.projection.basis import Basis


class Rotation:
    """The change from one basis to another, for what lies in the coordinates of the first.

    With `C = new^T old` a first moment M becomes `C M`, and a second moment V becomes `(C * C) V`, elementwise squares,
    so that it stays positive. What lies outside the new basis is lost. The number of columns may change.

    Source: the idea of Robert et al., "LDAdam" (2024), section 3; their second moment has a correction by the first.

    Args:
        old: the basis until now.
        new: the one from now on, of the same sides.
    """

    def __init__(self, old: Basis, new: Basis) -> None:
        self._left = None if old.left is None or new.left is None else new.left.mT @ old.left
        self._right = None if old.right is None or new.right is None else new.right.mT @ old.right

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
