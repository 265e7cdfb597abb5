"""grokadamw's GrokAdamW, with its state where optimizers keep theirs."""

from __future__ import annotations

import copy
import logging
from contextlib import nullcontext
from typing import Any

import torch

from tr_optim.adapters import WholeParameters, require_parts


def _library() -> Any:
    """Import the library without the handler that it gives the root logger, and without autocast around its update.

    The update is of tensors of one type each: autocast changes nothing but to warn on a machine without a GPU.
    """
    root = logging.getLogger()
    before = list(root.handlers), root.level
    try:
        (found,) = require_parts("grokadamw", ("grokadamw",), "grokadamw")
    finally:
        root.handlers[:], root.level = before
    found.autocast = nullcontext
    return found


_LIBRARY = _library()


class GrokAdamW(WholeParameters, _LIBRARY.GrokAdamW):
    """grokadamw's GrokAdamW: AdamW that amplifies slow gradients by an average of them.

    Fixed: the state is `step`, `exp_avg`, `exp_avg_sq` and `grok_ema` of each parameter in `state`. The library puts it
    into groups, by tensors, and that cannot be saved. It stays in host memory between steps, as the library has it.

    Source: Lee et al., "Grokfast: accelerated grokking by amplifying slow gradients" (2024), by grokadamw.
    """

    why_whole = "and gradients are clipped by their norms"

    def _update_group(
        self, group: dict[str, Any], params: list[torch.Tensor], grads: list[torch.Tensor], grokking_signal: Any
    ) -> None:
        """Update the parameters of a group from the state in `self.state`."""
        states = {}
        for parameter in params:
            own = self.state[parameter]
            if not own:
                own["step"] = torch.zeros((), dtype=torch.float64)
                for name in ("exp_avg", "exp_avg_sq", "grok_ema"):
                    own[name] = torch.zeros_like(parameter, device="cpu")
            states[parameter] = {**own, "step": int(own["step"])}
        _LIBRARY.GrokAdamW._update_group({**group, "state": states}, params, grads, grokking_signal)
        for parameter, state in states.items():
            self.state[parameter] = {**state, "step": torch.tensor(float(state["step"]), dtype=torch.float64)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state as copies."""
        signals = [group["grokking_signal_fns"] for group in self.param_groups]
        super().load_state_dict({**state_dict, "state": copy.deepcopy(state_dict["state"])})
        for group, functions in zip(self.param_groups, signals, strict=True):
            group["grokking_signal_fns"] = functions  # functions are not saved
            for parameter in group["params"]:
                if parameter in self.state:
                    self.state[parameter]["step"] = self.state[parameter]["step"].to("cpu", torch.float64)
