"""Read and compare the parameter groups of an optimizer, and apply changed options to a restored one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tr_core.model_io import to_plain
from tr_core.signatures import parameters_of

# Options that select how a step is computed, not what: they have no state.
_IMPLEMENTATION_OPTIONS = ("foreach", "fused", "capturable", "differentiable")


@dataclass(frozen=True)
class Group:
    """Describe a parameter group at its construction.

    Attributes:
        rate: its base learning rate.
        options: the optimizer's other options.
    """

    parameters: list[str]
    rate: float
    options: dict[str, Any]

    def plain(self) -> dict[str, Any]:
        """Return the group as plain JSON values."""
        options = to_plain(self.options, str)
        return {"parameters": self.parameters, "learning_rate": self.rate, "options": options}


@dataclass(frozen=True)
class GroupChange:
    """Describe one value of one group that the current arguments change.

    Attributes:
        name: `learning_rate`, or an option.
        saved: the value by the arguments of the checkpoint.
        current: the value by the current arguments.
    """

    group: int
    name: str
    saved: Any
    current: Any


def read_groups(optimizer: torch.optim.Optimizer, model: nn.Module) -> list[Group]:
    """Return the groups of an optimizer just after it and its schedule were built."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [
        Group(
            [names.get(id(parameter), "") for parameter in group["params"]],
            float(group.get("initial_lr", group["lr"])),
            {name: group[name] for name in optimizer.defaults if name in group and name not in ("lr", "params")},
        )
        for group in optimizer.param_groups
    ]


def compare_groups(saved: Sequence[Mapping[str, Any]], current: Sequence[Group]) -> list[GroupChange]:
    """Return the differences between the groups of a checkpoint's settings and the current groups.

    Raises:
        ValueError: the same parameters have another order. An optimizer assigns their states by this order.
    """
    _check_order(saved, current)
    changes = []
    for place, (old, group) in enumerate(zip(saved, current, strict=False)):  # torch refuses another number of groups
        if old["learning_rate"] != group.rate:
            changes.append(GroupChange(place, "learning_rate", old["learning_rate"], group.rate))
        for name, value in group.options.items():
            if name in old["options"] and old["options"][name] != to_plain(value, str):
                changes.append(GroupChange(place, name, old["options"][name], value))
    return changes


def apply_options(optimizer: torch.optim.Optimizer, changes: Sequence[GroupChange]) -> None:
    """Set the changed options of a restored optimizer; the schedule sets learning rates.

    Raises:
        ValueError: an option needs a state of each parameter that the checkpoint does not hold.
    """
    changes = [change for change in changes if change.name != "learning_rate"]
    for change in changes:
        optimizer.param_groups[change.group][change.name] = change.current
    for change in changes:
        if change.name not in (*_IMPLEMENTATION_OPTIONS, "weight_decay"):
            _check_state_suffices(optimizer, change)
    if any(change.name in _IMPLEMENTATION_OPTIONS for change in changes):
        optimizer.load_state_dict(optimizer.state_dict())  # these options decide the device of the step count


def set_rate(group: dict[str, Any], rate: float) -> None:
    """Set a group's learning rate, in place if it is a tensor."""
    if isinstance(group["lr"], torch.Tensor):
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate


def check_state_shapes(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Raise if a torch optimizer's state of a parameter has another shape than the parameter.

    Raises:
        ValueError: the message names the first such parameter.
    """
    if type(optimizer) not in _SHAPED_AS_PARAMETERS:
        return
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, torch.Tensor) and value.dim() and value.shape != parameter.shape:
                raise ValueError(
                    f"the optimizer's state does not fit the model: {key} of {name} has the shape "
                    f"{tuple(value.shape)}, the parameter {tuple(parameter.shape)}; resume with the model that it was "
                    "saved with, its parameters in the same order"
                )


_SHAPED_AS_PARAMETERS = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adamax,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.ASGD,
)


def _check_order(saved: Sequence[Mapping[str, Any]], current: Sequence[Group]) -> None:
    old = [name for group in saved for name in group["parameters"]]
    new = [name for group in current for name in group.parameters]
    if old == new or sorted(old) != sorted(new):  # other names: the model's state shows that
        return
    before, after = next((a, b) for a, b in zip(old, new, strict=True) if a != b)
    raise ValueError(
        f"the optimizer's state is kept by the order of the parameters, and {after} comes where {before} came when it "
        "was saved; give the model its layers, and the optimizer its parameter groups, in the saved order"
    )


def _check_state_suffices(optimizer: torch.optim.Optimizer, change: GroupChange) -> None:
    group = optimizer.param_groups[change.group]
    # Compares what the change adds to a state: the rest of a state may depend on a parameter's shape.
    before = _state_names(type(optimizer), {**group, change.name: change.saved})
    needed = _state_names(type(optimizer), group) - before
    for parameter in group["params"]:
        state = optimizer.state.get(parameter)
        if state and (missing := sorted(needed - set(state))):
            raise ValueError(
                f"{change.name}: {change.saved} -> {change.current} needs {' and '.join(missing)} of every parameter, "
                f"which the checkpoint does not hold; resume with {change.name}={change.saved}"
            )


def _state_names(kind: Callable[..., torch.optim.Optimizer], group: Mapping[str, Any]) -> set[str]:
    """Return the names of an optimizer's state of a parameter, from a trial step of its class."""
    taken = set(parameters_of(kind)) - {"params", "lr", *_IMPLEMENTATION_OPTIONS}
    parameter = nn.Parameter(torch.zeros(2, 2))
    parameter.grad = torch.zeros(2, 2)
    try:
        trial = kind([parameter], lr=0.0, **{name: value for name, value in group.items() if name in taken})
        trial.step()
    except Exception:  # its constructor takes other arguments
        return set()
    return set(trial.state[parameter])
