"""Find bases less often where they hardly change."""

from __future__ import annotations

from typing import Any

import torch

from tr_optim.projection.rotation import Rotation

State = dict[str, Any]


class LazyRefresh:
    """Double a matrix's gap from one basis to its next once its last few bases were alike.

    After each refresh the cosine between the old and the new subspace is noted; once as many as `window` were, and
    while their mean is at least `cosine`, the gap doubles with every refresh. The first of them are those of the fixed
    schedule, matrices taking turns.

    State of a matrix: `overlaps`, the last `window` cosines (-inf before there are so many), float32 on its device, and
    `refreshed`, the step of its last refresh and how often the gap was doubled by then, float64 on the CPU: `4 window +
    16` bytes. The schedule depends on them alone, so that ranks, whose bases are equal, have the same, and so has a
    resumed run. Of parameters in shards the cosine is that of the whole matrix, or stack, added up over the ranks. The
    cosines are copied to the host as the basis is found, and looked at a gap later: only after a resume does that wait
    for the device, once for each matrix.

    Source: Zhang et al., "Q-GaLore" (2024), section 3.2, with the values of its code: 5 refreshes, a cosine of 0.4, a
    factor of 2. Deviation: theirs is the cosine of the first singular vectors, whose sign is arbitrary and which turn
    among themselves where singular values are close; here it is that of all principal angles (see
    `Rotation.cosine`), which is 0 in the mean for subspaces that have nothing to do with each other.

    Args:
        cosine: mean from which the gap doubles.
        window: refreshes that the mean is over.
    """

    def __init__(self, cosine: float, window: int) -> None:
        self._cosine, self._window = cosine, window
        self._copies: dict[torch.Tensor, tuple[torch.Tensor, torch.Tensor, Any]] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy is made of: not what is on its way from the device."""
        return {**vars(self), "_copies": {}}

    def is_due(self, parameter: torch.Tensor, state: State, gap: int, phase: int) -> bool:
        """Whether a matrix that has a basis finds a new one in the step that comes.

        Args:
            parameter: the matrix.
            state: its state.
            gap: steps from one basis to the next at first.
            phase: how many steps earlier than the first matrix it has its turns.
        """
        steps_done = int(state["step"])
        if "refreshed" not in state:  # the last basis was found when the schedule was not lazy
            return steps_done > 0 and (steps_done + phase) % gap == 0
        last, doublings = state["refreshed"].tolist()  # on the CPU
        waited, wait = steps_done - last, gap * 2**doublings
        return steps_done > 0 and waited >= wait and (waited >= 2 * wait or not self._is_steady(parameter, state))

    def note(self, parameter: torch.Tensor, state: State, rotation: Rotation | None, phase: int) -> None:
        """Note that a matrix finds a basis in the step that comes.

        Args:
            parameter: the matrix.
            state: its state; it is changed.
            rotation: from the basis until now, None if there is none.
            phase: see `is_due`.
        """
        if rotation is None:
            state["refreshed"] = torch.tensor([-phase, 0.0], dtype=torch.float64)
            state["overlaps"] = torch.full((self._window,), -torch.inf, device=parameter.device)
            return
        doublings, new = 0.0, rotation.cosine().float().reshape(1)
        before = new.new_full((self._window,), -torch.inf)
        if "refreshed" in state:
            doublings = float(state["refreshed"][1]) + self._is_steady(parameter, state)
            before = torch.cat([before, state["overlaps"]])
        state["refreshed"] = torch.tensor([float(state["step"]), doublings], dtype=torch.float64)
        state["overlaps"] = torch.cat([before, new])[-self._window :].clone()
        self._begin_copy(parameter, state["overlaps"])

    def _is_steady(self, parameter: torch.Tensor, state: State) -> bool:
        """Whether the last bases of a matrix were alike."""
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
