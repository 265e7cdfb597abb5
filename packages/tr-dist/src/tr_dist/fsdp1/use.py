"""See which parameters a loss goes by: FSDP1 gives the others of a unit gradients of zeros, as if it went by them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed import fsdp

_NAMES_SHOWN = 5


class Use:
    """The trainable parameters that got a gradient in the backward passes of a step on this rank.

    A unit's parameters are parts of one flat tensor while it computes, and one gradient is computed for all of that. A
    zero is no sign of a parameter that was not used; a gradient that arrives at its part is one that was.

    Args:
        divided: what FSDP1 made of the model.
        names: of the trainable parameters.
    """

    def __init__(self, divided: nn.Module, names: list[str]) -> None:
        self._unused, self._all = set(names), names
        for prefix, module in divided.named_modules():
            if isinstance(module, fsdp.FullyShardedDataParallel):
                watch = _Watch(self._unused, _plain(prefix))
                hook: Any = torch.compiler.disable(watch.before_forward)
                module.module.register_forward_pre_hook(hook)

    def check(self) -> None:
        """Refuse a step whose loss did not go by some parameter, and begin another one.

        Raises:
            RuntimeError: the message names them.
        """
        unused = [name for name in self._all if name in self._unused]
        self._unused.update(self._all)
        if unused:
            shown = ", ".join(unused[:_NAMES_SHOWN]) + (" and more" if len(unused) > _NAMES_SHOWN else "")
            raise RuntimeError(
                f"{len(unused)} trainable parameters got no gradient in this step: {shown}; FSDP1 would have decay and "
                "momentum change them. Call backward(loss) inside accumulate(model, sync=...), use them in the loss, "
                "freeze them with requires_grad_(False), or set find_unused_parameters (ddp_find_unused_parameters)"
            )


class _Watch:
    """Notes, for one unit, whose parts of its flat parameter get gradients."""

    def __init__(self, unused: set[str], prefix: str) -> None:
        self._unused, self._prefix = unused, prefix

    def before_forward(self, module: nn.Module, inputs: Any) -> None:
        if not torch.is_grad_enabled():
            return
        for name, part in module.named_parameters(prefix=self._prefix):
            # Those of units inside are not gathered yet, and are no parts of a larger one.
            if part.grad_fn is not None and _plain(name) in self._unused:
                part.register_hook(self._noting(_plain(name)))

    def _noting(self, name: str) -> Any:
        def note(gradient: torch.Tensor | None) -> None:
            if gradient is not None:
                self._unused.discard(name)

        return note


def _plain(name: str) -> str:
    return ".".join(part for part in name.split(".") if part != "_fsdp_wrapped_module")
