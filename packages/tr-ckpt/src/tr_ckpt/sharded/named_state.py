"""Save a model and its optimizer under names that do not depend on world size, wrappers or parameter order."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from tr_ckpt.errors import CheckpointError
from tr_ckpt.layout import Layout, layout_of, optimizer_layout

# Components of a parameter's name that a wrapper adds: torch.compile, activation checkpointing, FSDP.
_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})


def stateful(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Any]:
    """Return the parts `model` and, if one is given, `optimizer` for `Checkpointer.save` and `.restore`.

    Args:
        model: sharded by `fully_shard` or by tensor parallelism, or not at all.
        optimizer: an optimizer of parameters of `model`.
    """
    parts: dict[str, Any] = {"model": ModelState(model)}
    if optimizer is not None:
        parts["optimizer"] = OptimizerState(model, optimizer)
    return parts


class ModelState:
    """The state of a model, under the names that its tensors have without wrappers."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model

    def state_dict(self) -> dict[str, Any]:
        """Return the model's state, not copied."""
        state = self.model.state_dict()
        named = OrderedDict((self._plain(name), value) for name, value in state.items())
        versions = getattr(state, "_metadata", None)
        if versions is not None:
            plain = OrderedDict((self._plain(name), value) for name, value in versions.items())
            named._metadata = plain  # pyright: ignore[reportAttributeAccessIssue]
        return named

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state from `state_dict` of this class or of a plain model.

        Raises:
            RuntimeError: it lacks tensors, or holds others.
        """
        own = self.model.state_dict()
        known = {self._plain(name): name for name in own}
        state = OrderedDict((known.get(name, name), value) for name, value in state_dict.items())
        versions = getattr(state_dict, "_metadata", None)
        if versions is not None:
            names = getattr(own, "_metadata", {})
            state._metadata = OrderedDict(  # pyright: ignore[reportAttributeAccessIssue]
                (name, versions[self._plain(name)]) for name in names if self._plain(name) in versions
            )
        self.model.load_state_dict(state)

    def tensor_layout(self) -> Layout:
        """Return the layout of the model's tensors over the ranks."""
        layout = layout_of(self.model)
        return Layout({self._plain(name): tensor for name, tensor in layout.like.items()})

    def _plain(self, name: str) -> str:
        return plain_name(self.model, name)


class OptimizerState:
    """The state of an optimizer, keyed by the names of the model's parameters instead of their numbers.

    The names are those of torch's `get_optimizer_state_dict`. That function is not used: if the optimizer has no state
    yet, it makes a step, which then counts as the optimizer's first.

    Args:
        model: the model of the parameters.
        optimizer: an optimizer of some or all of its parameters.

    Raises:
        CheckpointError: a parameter of the optimizer is not the model's.
    """

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model = model
        self.optimizer = optimizer
        self._groups()

    def state_dict(self) -> dict[str, Any]:
        """Return `{"state": {NAME: ...}, "param_groups": [{"params": [NAME, ...], ...}]}`, not copied."""
        state = self.optimizer.state_dict()
        groups = self._groups()
        name_of = {
            number: name
            for names, group in zip(groups, state["param_groups"], strict=True)
            for name, number in zip(names, group["params"], strict=True)
        }
        return {
            **state,
            "state": {name_of.get(number, number): value for number, value in state["state"].items()},
            "param_groups": [
                {**group, "params": names} for names, group in zip(groups, state["param_groups"], strict=True)
            ],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state that `state_dict` returned, for any order of the parameters.

        The state of a plain optimizer, keyed by numbers, is loaded in the order of the parameters.

        Raises:
            CheckpointError: it belongs to other parameters, or their groups had other options.
        """
        saved = state_dict["param_groups"]
        if not any(isinstance(key, str) for group in saved for key in group["params"]):
            self.optimizer.load_state_dict(state_dict)
            return
        groups = self._groups()
        _check_names(
            {name for names in groups for name in names}, {name for group in saved for name in group["params"]}
        )
        numbers = _numbers(groups)
        renumbered = {
            **state_dict,
            "state": {numbers.get(name, name): value for name, value in state_dict["state"].items()},
            "param_groups": [
                {**_options(number, names, saved), "params": [numbers[name] for name in names]}
                for number, names in enumerate(groups)
            ],
        }
        self.optimizer.load_state_dict(renumbered)

    def tensor_layout(self) -> Layout:
        """Return the layout of the state's tensors over the ranks, also before the first step makes them.

        Both keys of a parameter are included: its name, and its number for the state of a plain optimizer.
        """
        names = [name for group in self._groups() for name in group]
        parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        keyed = dict(zip(names, parameters, strict=True))
        keyed |= {str(number): parameter for number, parameter in enumerate(parameters)}
        return optimizer_layout(self.optimizer, keyed)

    def _groups(self) -> list[list[str]]:
        """Return the names of the parameters of each group."""
        name_of = {id(parameter): name for name, parameter in self.model.named_parameters()}
        groups = []
        for number, group in enumerate(self.optimizer.param_groups):
            for place, parameter in enumerate(group["params"]):
                if id(parameter) not in name_of:
                    raise CheckpointError(
                        f"parameter {place} of group {number} of the optimizer, of shape {list(parameter.shape)}, is "
                        "not one of the model's; build the optimizer after fully_shard, which replaces parameters, "
                        "and give the model that all of them belong to"
                    )
            groups.append([plain_name(self.model, name_of[id(parameter)]) for parameter in group["params"]])
        return groups


def plain_name(model: torch.nn.Module, name: str) -> str:
    """Return a parameter's name without the components that wrappers of modules add."""
    steps = name.split(".")
    if isinstance(model, torch.nn.parallel.DistributedDataParallel) and steps[0] == "module":
        steps = steps[1:]
    return ".".join(step for step in steps if step not in _WRAPPERS)


def _numbers(groups: Iterable[Iterable[str]]) -> dict[str, int]:
    return {name: number for number, name in enumerate(name for names in groups for name in names)}


def _check_names(own: set[str], saved: set[str]) -> None:
    if own == saved:
        return
    lacking, foreign = sorted(own - saved), sorted(saved - own)
    said = [f"it lacks {', '.join(lacking[:3])}{' and more' * (len(lacking) > 3)}"] if lacking else []
    said += [f"it holds {', '.join(foreign[:3])}{' and more' * (len(foreign) > 3)}"] if foreign else []
    raise CheckpointError(f"the optimizer's state is one of other parameters: {'; '.join(said)}")


def _options(number: int, names: list[str], saved: list[dict[str, Any]]) -> Mapping[str, Any]:
    """Return the options that the parameters of a group were saved with."""
    sources = [group for group in saved if not names or any(name in group["params"] for name in names)]
    if not names:
        sources = saved[number : number + 1]
    # Names given to the optimizer itself follow its own order.
    options = [
        {key: value for key, value in group.items() if key not in ("params", "param_names")} for group in sources
    ]
    if not options or any(other != options[0] for other in options[1:]):
        raise CheckpointError(
            f"the parameters of group {number} were saved in groups of different options; "
            "build the optimizer with the groups it was saved with"
        )
    return options[0]
