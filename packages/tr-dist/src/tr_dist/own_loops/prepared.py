"""Make an optimizer and a schedule act only when a step is due."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler


class Due(Protocol):
    """The owner that decides whether a step is due."""

    @property
    def is_step_due(self) -> bool:
        """Whether the latest micro-batch was the last of its step."""
        ...

    def make_step(self, optimizer: torch.optim.Optimizer) -> bool:
        """Apply the gradients; False if an overflow skipped the step."""
        ...


class PreparedOptimizer(torch.optim.Optimizer):
    """An optimizer whose `step` and `zero_grad` act after the last micro-batch of a step, and do nothing before.

    Groups, state, defaults and the saved state are those of the inner optimizer.

    Args:
        inner: the optimizer.
        loop: decides when a step is due.
    """

    def __init__(self, inner: torch.optim.Optimizer, loop: Due) -> None:  # not the base's, which makes its own groups
        self.inner, self._loop = inner, loop
        self.was_step_made = False

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        """The groups."""
        return self.inner.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The state."""
        return self.inner.state

    @property
    def defaults(self) -> Any:  # type: ignore[override]
        """The defaults."""
        return self.inner.defaults

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Apply the gradients if a step is due.

        Raises:
            ValueError: a closure is given; it would compute gradients without the other ranks.
        """
        if closure is not None:
            raise ValueError("step(closure) is not possible over several ranks; call loop.backward(loss), then step()")
        self.was_step_made = self._loop.is_step_due and self._loop.make_step(self.inner)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, unless this step is still accumulating them."""
        if self._loop.is_step_due:
            self.inner.zero_grad(set_to_none=set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's."""
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the optimizer's state."""
        self.inner.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse: the groups are distributed when the optimizer is prepared."""
        raise ValueError("add parameter groups before prepare(optimizer)")

    def __repr__(self) -> str:
        return repr(self.inner)


class PreparedSchedule:
    """A schedule that advances when the optimizer has made a step, and not if a step was not due or skipped.

    Args:
        inner: the schedule.
        optimizer: the prepared one.
    """

    def __init__(self, inner: LRScheduler, optimizer: PreparedOptimizer) -> None:
        self.inner, self._optimizer = inner, optimizer

    def step(self, *args: Any) -> None:
        """Advance, if a step was made."""
        if self._optimizer.was_step_made:
            self.inner.step(*args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def follow_parameters(optimizer: torch.optim.Optimizer, names: dict[int, str], model: nn.Module) -> None:
    """Replace the parameters of an optimizer by the model's present ones, which have the same names.

    Args:
        optimizer: without state.
        names: of the model's former parameters, by identity.
        model: the model with its present parameters.

    Raises:
        ValueError: the optimizer has state already, or holds other parameters, or consumes gradients in backward.
    """
    own = dict(model.named_parameters())
    current = {id(parameter) for parameter in own.values()}
    groups = [group["params"] for group in optimizer.param_groups]
    if all(id(parameter) in current for params in groups for parameter in params):
        return
    kind = type(optimizer).__name__
    if foreign := sum(id(p) not in current and id(p) not in names for params in groups for p in params):
        raise ValueError(
            f"{foreign} parameters of {kind} are not the model's; build it over the parameters of the module that is "
            "prepared, and prepare both in one call"
        )
    if optimizer.state or hasattr(optimizer, "fused_in_backward"):
        why = "has state already" if optimizer.state else "holds on to its parameters"
        raise ValueError(
            f"{kind} {why}, and dividing the model gives it other parameters; prepare the model first, and build the "
            "optimizer over what prepare() returned"
        )
    for params in groups:
        params[:] = [own[names[id(p)]] if id(p) not in current else p for p in params]
