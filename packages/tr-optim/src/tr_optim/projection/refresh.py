"""Decide when a parameter gets a new basis, and rotate its moments from the old basis.

The schedule is fixed, or lazy: then bases that hardly change are found less often.
"""

from __future__ import annotations

from typing import Any

import torch

from tr_optim.engine.shards import Shards
from tr_optim.projection.basis import Basis


def is_due(steps_done: int, gap: int, *, index: int, count: int, staggers: bool) -> bool:
    """Whether a matrix that has a basis finds a new one in the step after `steps_done`.

    Staggered matrices take turns, so that no step has the work, or the full gradients, of all. Every matrix has its
    turn each `gap` steps, and at most `ceil(count / gap)` of them in the same step. It depends only on these numbers,
    so a resumed run has the same schedule.

    Args:
        steps_done: updates of the matrix so far.
        gap: steps from one basis to the next.
        index: number of the matrix among the projected ones.
        count: number of projected matrices.
        staggers: whether they take turns; otherwise all are due in every `gap`-th step.
    """
    return steps_done > 0 and (steps_done + phase(gap, index=index, count=count, staggers=staggers)) % gap == 0


def phase(gap: int, *, index: int, count: int, staggers: bool) -> int:
    """Return how many steps earlier than the first a matrix has its turns."""
    return index * gap // count if staggers else 0


class Rotation:
    """The change from one basis to another, for moments in the coordinates of the first.

    With `C = new^T old`, a first moment M becomes `C M`. A second moment V becomes `(C * C) V`, with elementwise
    squares, so that it stays positive. The part outside the new basis is lost. The number of columns may change.

    Source: the idea of Robert et al., "LDAdam" (2024), section 3; their second moment has a correction by the first.

    Args:
        old: the old basis.
        new: the new one, of the same sides.
        shards: how the parameter's rows are divided over ranks; each rank has its rows of the left columns, or whole
            matrices of a stack. None for a whole parameter. Collective with shards: all ranks make it and call the same
            methods.
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
        """The dtype of the bases, which it computes in."""
        return next((change.dtype for change in (self._left, self._right) if change is not None), torch.float32)

    def cosine(self) -> torch.Tensor:
        """Return the similarity of the two subspaces, a scalar: 1 for equal ones, 0 on average for random ones.

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
        # Averaged even if all ranks have it: a difference in the last digit could change the steps of their next bases.
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


State = dict[str, Any]


class LazyRefresh:
    """Double a matrix's gap between two bases once its last few bases were similar.

    Each refresh records the cosine between the old and the new subspace. Once there are `window` cosines, and while
    their mean is at least `cosine`, the gap doubles with every refresh. The first refreshes follow the fixed schedule,
    with matrices in turn.

    State of a matrix: `overlaps`, the last `window` cosines (-inf before there are so many), float32 on its device; and
    `refreshed`, the step of its last refresh and the number of doublings so far, float64 on the CPU: `4 window + 16`
    bytes. The schedule depends only on them. So all ranks, whose bases are equal, have the same schedule, and a resumed
    run too. For sharded parameters the cosine is that of the whole matrix or stack, summed over the ranks. Cosines are
    copied to the host when the basis is found, and read one gap later. Sync: only after a resume, once for each matrix.

    Source: Zhang et al., "Q-GaLore" (2024), section 3.2, with the values of its code: 5 refreshes, a cosine of 0.4, a
    factor of 2. Deviation: theirs is the cosine of the first singular vectors. Their sign is arbitrary, and they rotate
    among themselves if singular values are close. Here it is the cosine of all principal angles (see
    `Rotation.cosine`), which is 0 on average for unrelated subspaces.

    Args:
        cosine: mean from which the gap doubles.
        window: number of refreshes in the mean.
    """

    def __init__(self, cosine: float, window: int) -> None:
        self._cosine, self._window = cosine, window
        self._copies: dict[torch.Tensor, tuple[torch.Tensor, torch.Tensor, Any]] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes of a copy, without pending copies from the device."""
        return {**vars(self), "_copies": {}}

    def is_due(self, parameter: torch.Tensor, state: State, gap: int, phase: int) -> bool:
        """Whether a matrix that has a basis finds a new one in the coming step.

        Args:
            parameter: the matrix.
            state: its state.
            gap: steps from one basis to the next at first.
            phase: number of steps by which its turns precede those of the first matrix.
        """
        steps_done = int(state["step"])
        if "refreshed" not in state:  # the last basis was found when the schedule was not lazy
            return steps_done > 0 and (steps_done + phase) % gap == 0
        last, doublings = state["refreshed"].tolist()  # on the CPU
        waited, wait = steps_done - last, gap * 2**doublings
        return steps_done > 0 and waited >= wait and (waited >= 2 * wait or not self._is_steady(parameter, state))

    def note(self, parameter: torch.Tensor, state: State, rotation: Rotation | None, phase: int) -> None:
        """Record that a matrix finds a basis in the coming step.

        Args:
            parameter: the matrix.
            state: its state; it is changed.
            rotation: from the old basis, None if there is none.
            phase: see `is_due`.
        """
        if rotation is None:
            state["refreshed"] = torch.tensor([-phase, 0.0], dtype=torch.float64)
            state["overlaps"] = torch.full((self._window,), -torch.inf, device=parameter.device)
        else:
            doublings, new = 0.0, rotation.cosine().float().reshape(1)
            before = new.new_full((self._window,), -torch.inf)
            if "refreshed" in state:
                doublings = float(state["refreshed"][1]) + self._is_steady(parameter, state)
                before = torch.cat([before, state["overlaps"]])
            state["refreshed"] = torch.tensor([float(state["step"]), doublings], dtype=torch.float64)
            state["overlaps"] = torch.cat([before, new])[-self._window :].clone()
        self._begin_copy(parameter, state["overlaps"])

    def _is_steady(self, parameter: torch.Tensor, state: State) -> bool:
        """Whether the last bases of a matrix were similar."""
        return float(self._read(parameter, state["overlaps"]).mean()) >= self._cosine

    def _begin_copy(self, parameter: torch.Tensor, overlaps: torch.Tensor) -> None:
        if overlaps.device.type != "cuda":
            return
        host = torch.empty(overlaps.shape, dtype=overlaps.dtype, pin_memory=True)
        host.copy_(overlaps, non_blocking=True)
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(overlaps.device))
        self._copies[parameter] = overlaps, host, event

    def _read(self, parameter: torch.Tensor, overlaps: torch.Tensor) -> torch.Tensor:
        """Return overlaps on the host."""
        if overlaps.device.type == "cpu":
            return overlaps
        source, host, event = self._copies.get(parameter, (None, None, None))
        if source is not overlaps:
            host, event = overlaps.cpu(), None  # sync: once for each matrix after a resume
            self._copies[parameter] = overlaps, host, event
        if event is not None:
            event.synchronize()  # sync: for a copy that was begun a gap ago
        assert host is not None
        return host
