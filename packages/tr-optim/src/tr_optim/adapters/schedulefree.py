"""schedulefree's AdamW, RAdam and SGD, which need no schedule, with parameters that can be checked."""

from __future__ import annotations

import copy
from itertools import chain
from typing import Any

import torch

from tr_optim.adapters import WholeParameters, require

_LIBRARY = require("schedulefree", "schedulefree")


class _ScheduleFree(WholeParameters):
    """Base of the library's optimizers.

    During training the parameters are the points y at which gradients are computed. `eval()` swaps in their average x,
    which is the result, and `train()` swaps y back in. A Trainer calls both, and saves the weights x.

    Fixed: `train()` brings back the same bits, for which `eval()` keeps a copy of y, and `state_dict` has it then. The
    library computes y from x, and rounds: a run would depend on when it evaluates, saves and resumes.
    """

    why_whole = "which is not tried"
    # By parameter: y, and the version of the parameter that holds x; None where x is loaded apart from y.
    _points: dict[torch.Tensor, tuple[torch.Tensor, int | None]] | None = None

    def eval(self) -> None:
        """Swap the average into the parameters."""
        if not all(group["train_mode"] for group in self.param_groups):
            self._swap("eval")
            return
        # Only parameters with a state have moved.
        before = {parameter: parameter.detach().clone() for parameter, state in self.state.items() if state}
        self._swap("eval")
        self._points = {parameter: (point, parameter._version) for parameter, point in before.items()}

    def train(self) -> None:
        """Swap back in the points of before `eval()`, or of the loaded state, unless other weights were loaded since.

        Sync: after a resume it compares the points with those that the library computes.
        """
        before, self._points = self._points or {}, None
        held = [parameter for parameter, (_, version) in before.items() if version in (None, parameter._version)]
        self._swap("train")
        with torch.no_grad():
            for parameter in held:
                point, version = before[parameter]
                if version is not None or _is_near(point, parameter):
                    parameter.copy_(point)

    def state_dict(self) -> dict[str, Any]:
        """Return the state; between `eval()` and `train()` it has the points as `y`."""
        found = super().state_dict()
        points = self._points or {}
        numbered = enumerate(chain.from_iterable(group["params"] for group in self.param_groups))
        added = {number: {"y": points[parameter][0]} for number, parameter in numbered if parameter in points}
        state = {number: {**saved, **added.get(number, {})} for number, saved in found["state"].items()}
        return {**found, "state": state}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state, of this class or of the library's own, as copies."""
        saved = copy.deepcopy(state_dict["state"])
        points = {number: state.pop("y") for number, state in saved.items() if "y" in state}
        super().load_state_dict({**state_dict, "state": saved})
        numbers = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        parameters = chain.from_iterable(group["params"] for group in self.param_groups)
        self._points = {
            parameter: (points[number].to(parameter), None)
            for number, parameter in zip(numbers, parameters, strict=True)
            if number in points
        }

    def _swap(self, mode: str) -> None:
        getattr(super(), mode)()


def _is_near(point: torch.Tensor, computed: torch.Tensor) -> bool:
    tolerance = 16 * torch.finfo(point.dtype).eps
    return torch.allclose(point, computed, rtol=tolerance, atol=tolerance * float(point.abs().max()))


class ScheduleFreeAdamW(_ScheduleFree, _LIBRARY.AdamWScheduleFree):
    """schedulefree's AdamWScheduleFree.

    Source: Defazio et al., "The road less scheduled" (2024), by schedulefree.
    """


class ScheduleFreeRAdam(_ScheduleFree, _LIBRARY.RAdamScheduleFree):
    """schedulefree's RAdamScheduleFree, which needs no warmup.

    Source: Defazio et al., "The road less scheduled" (2024), with Liu et al., "On the variance of the adaptive learning
    rate and beyond" (2020), by schedulefree.
    """


class ScheduleFreeSGD(_ScheduleFree, _LIBRARY.SGDScheduleFree):
    """schedulefree's SGDScheduleFree.

    Source: Defazio et al., "The road less scheduled" (2024), by schedulefree.
    """
