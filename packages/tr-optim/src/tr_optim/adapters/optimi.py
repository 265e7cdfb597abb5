"""torch-optimi's StableAdamW, with a state of plain tensors."""

from __future__ import annotations

import copy
from typing import Any

import torch

from tr_optim.adapters import WholeParameters, require

_LIBRARY = require("optimi", "torch-optimi")
_PARTS = require("optimi.stableadamw", "torch-optimi")
_SAVED = ("exp_avg", "exp_avg_sq", "kahan_comp")


class OptimiStableAdamW(WholeParameters, _LIBRARY.StableAdamW):
    """torch-optimi's StableAdamW: AdamW whose step is shortened where a gradient surprises its second moment.

    Fixed: the state that is saved is plain tensors, and the count of steps a number in its group. Triton's kernels are
    used where the parameters are on a GPU: the library uses them wherever Triton is installed, on the CPU too.

    Source: Wortsman et al., "Stable and low-precision training for large-scale vision-language models" (2023), by
    torch-optimi.
    """

    why_whole = "and the step depends on a mean over all of it"

    def state_dict(self) -> dict[str, Any]:
        """Return the state, of plain tensors; each group has its count of steps."""
        found = super().state_dict()
        state = {
            number: {name: value for name, value in saved.items() if name in _SAVED and value is not None}
            for number, saved in found["state"].items()
        }
        groups = [{**group, "step": int(group.get("step", 0))} for group in found["param_groups"]]
        return {**found, "state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state, of this class or of the library's own, as copies."""
        own = [group["triton"] for group in self.param_groups]
        super().load_state_dict(copy.deepcopy(state_dict))
        for group, triton in zip(self.param_groups, own, strict=True):
            group["step"] = torch.tensor(int(group["step"]), dtype=torch.int32)
            group["triton"] = triton  # what this device has, which another one saved
            if group["setup"] and triton is None and group["foreach"] is None:
                group["triton"] = _PARTS._default_to_triton([p for p in group["params"] if p.requires_grad])
            for parameter in group["params"]:
                if parameter in self.state:
                    self._complete(group, parameter)

    def _init_group(self, group: dict[str, Any], **lists: Any) -> None:
        if not group["setup"] and group["triton"] is None and group["foreach"] is None:
            # The library asks this of a list of parameters that it has not filled yet.
            group["triton"] = _PARTS._default_to_triton(group["params"])
        super()._init_group(group, **lists)

    def _complete(self, group: dict[str, Any], parameter: torch.Tensor) -> None:
        state = {name: value for name, value in self.state[parameter].items() if name in _SAVED}
        fresh: dict[str, Any] = {}
        self._init_state(group, fresh, parameter)  # type: ignore[arg-type]
        self.state[parameter] = {**fresh, **{name: value for name, value in state.items() if value is not None}}
