"""Select the optimizer and the schedule of a run: the user's own, or new ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from tr_args import TrainingArguments
from tr_core.model_io import to_plain
from tr_core.validation import check_given_parts_fit

# Arguments that an optimizer, and a schedule, are built from.
_OPTIMIZER_ARGUMENTS = (
    "learning_rate",
    "weight_decay",
    "adam_beta1",
    "adam_beta2",
    "adam_epsilon",
    "optim",
    "optim_args",
    "optim_target_modules",
    "parameter_rules",
)
_SCHEDULE_ARGUMENTS = ("lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "greater_is_better")

Groups = list[dict[str, Any]]


@dataclass
class _Built:
    """Record an optimizer or schedule after its construction, or after a run.

    Attributes:
        left_out: ids of the model's trainable parameters that the optimizer did not hold at that time.
        groups: the optimizer's groups at that time, as `_read_groups` returns them.
        is_edited: whether the groups were edited before a schedule was built for them.
    """

    part: Any
    arguments: dict[str, Any]
    left_out: frozenset[int]
    groups: Groups
    is_edited: bool = False


class ChosenOptimizer:
    """Record which optimizer and schedule the user passed or assigned, and which were built instead.

    - Every run uses what was passed to the Trainer, or assigned to its `optimizer` or `lr_scheduler`, until something
      else, or None, is assigned.
    - A run uses what `create_optimizer` or `create_scheduler` built before it, with all edits of the groups. If
      arguments or the model changed since then, it is built again. If groups were edited too, the run is refused.
    - A second run replaces what the first one built.
    """

    def __init__(self, optimizer: torch.optim.Optimizer | None, schedule: LRScheduler | None) -> None:
        self.optimizer, self.schedule = optimizer, schedule
        self._is_building = False
        self._built: dict[str, _Built] = {}
        self._left: Groups | None = None
        self._trained: tuple[Any, Any] = (None, None)

    def assign(self, name: str, value: Any) -> None:
        """Record an assignment to the Trainer's `optimizer` or `lr_scheduler`."""
        if self._is_building:
            return
        if name == "optimizer":
            self.optimizer = value
        else:
            self.schedule = value

    @contextmanager
    def building(self) -> Iterator[None]:
        """Return a block for building: an assignment inside it is not a user's choice."""
        before, self._is_building = self._is_building, True
        try:
            yield
        finally:
            self._is_building = before

    def note_optimizer(self, optimizer: torch.optim.Optimizer, model: nn.Module, args: TrainingArguments) -> None:
        """Record what an optimizer was built from."""
        values = _values(args, _OPTIMIZER_ARGUMENTS)
        built = _Built(optimizer, values, _left_out(optimizer, model), _read_groups(optimizer))
        self._built = {**self._built, "optimizer": built}

    def before_schedule(self, optimizer: Any) -> None:
        """Record an optimizer's groups before building a schedule changes their learning rates."""
        built = self._built.get("optimizer")
        if built is not None and built.part is optimizer:
            built.is_edited |= _read_groups(optimizer) != built.groups

    def note_schedule(self, schedule: Any, optimizer: Any, args: TrainingArguments) -> None:
        """Record what a schedule was built from, and the groups after that."""
        self._built = {**self._built, "schedule": _Built(schedule, _values(args, _SCHEDULE_ARGUMENTS), frozenset(), [])}
        built = self._built.get("optimizer")
        if built is not None and built.part is optimizer:
            built.groups = _read_groups(optimizer)

    def to_train_with(
        self, optimizer: Any, schedule: Any, model: nn.Module, args: TrainingArguments
    ) -> tuple[Any, Any]:
        """Return the optimizer and the schedule that the next run reuses; None for each that must be built.

        Raises:
            ValueError: the optimizer would be built again but its groups were edited, or the schedule belongs to
                another optimizer.
        """
        if optimizer is not self.optimizer and optimizer is not None and self._is_outdated(optimizer, model, args):
            optimizer = None
        if schedule is None or schedule is self.schedule:
            check_given_parts_fit(None, optimizer, schedule)
            return optimizer, schedule
        built = self._built.get("schedule")
        is_fresh = schedule is not self._trained[1] and getattr(schedule, "optimizer", optimizer) is optimizer
        if optimizer is None or not is_fresh:
            return optimizer, None
        if built is not None and built.part is schedule and built.arguments != _values(args, _SCHEDULE_ARGUMENTS):
            return optimizer, None
        return optimizer, schedule

    def follow(self, optimizer: Any, names: Mapping[int, list[str]], model: nn.Module, *, is_part: bool) -> None:
        """Have an optimizer train the parameters that a strategy put in the place of those that it was built with.

        Args:
            optimizer: None if there is none yet.
            names: of the model's parameters before, by their ids; those that are tied have several.
            model: prepared.
            is_part: whether the model has given parameters up, as those of other stages; they are left out.

        Raises:
            ValueError: the optimizer has state of parameters that were replaced, or they are not found by their names.
        """
        by_name = dict(model.named_parameters(remove_duplicate=False))
        held = {id(p) for p in by_name.values()}
        groups: Groups = getattr(optimizer, "param_groups", [])
        replaced = {
            p: [by_name[name] for name in names[id(p)] if name in by_name][:1]
            for group in groups
            for p in group["params"]
            if id(p) in names and id(p) not in held
        }
        lost = [names[id(p)][0] for p, new in replaced.items() if not new and not is_part]
        if lost or any(optimizer.state.get(p) for p in replaced):
            what = lost[0] if lost else "parameters that it has state of"
            raise ValueError(
                f"{type(optimizer).__name__} cannot follow {what}, as the model is divided over processes; give one "
                "that has made no step, and resume to have its state, or set optimizer_cls_and_kwargs: it is built then"
            )
        for group in groups if replaced else ():
            group["params"] = [new for p in group["params"] for new in replaced.get(p, [p])]

    def begin(self, optimizer: Any, schedule: Any) -> None:
        """Record the optimizer and the schedule of a run."""
        self._trained, self._left = (optimizer, schedule), None

    def end(self) -> None:
        """Record the optimizer's groups after a run."""
        if self._trained[0] is not None:
            self._left = _read_groups(self._trained[0])

    def _is_outdated(self, optimizer: Any, model: nn.Module, args: TrainingArguments) -> bool:
        if optimizer is self._trained[0]:
            if self._left is not None and _read_groups(optimizer) != self._left:
                raise ValueError(
                    f"the parameter groups of {type(optimizer).__name__} were edited after the run that it was built "
                    "for, and a new run builds a new one; to train with this one, moments included, assign it: "
                    "trainer.optimizer = trainer.optimizer. Else change the arguments, or call create_optimizer() "
                    "after trainer.optimizer = None, and edit what it returns"
                )
            return True
        built = self._built.get("optimizer")
        if built is None or built.part is not optimizer:
            return False
        changed = [
            name for name, value in _values(args, _OPTIMIZER_ARGUMENTS).items() if built.arguments[name] != value
        ]
        if not _left_out(optimizer, model) <= built.left_out:
            changed.append("the model's trainable parameters")
        if changed and (built.is_edited or _read_groups(optimizer) != built.groups):
            raise ValueError(
                f"{', '.join(changed)} changed after create_optimizer() had built {type(optimizer).__name__}, whose "
                "parameter groups were edited since: one of the two would be lost. Set trainer.optimizer = None to "
                "build it again, or trainer.optimizer = trainer.optimizer to train with it as it is"
            )
        return bool(changed)


def _values(args: TrainingArguments, names: tuple[str, ...]) -> dict[str, Any]:
    values = args.to_dict()
    return {name: values[name] for name in names}


def _left_out(optimizer: torch.optim.Optimizer, model: nn.Module) -> frozenset[int]:
    """Return the ids of the model's trainable parameters that an optimizer does not hold."""
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    return frozenset(id(p) for p in model.parameters() if p.requires_grad and id(p) not in held)


def _read_groups(optimizer: torch.optim.Optimizer) -> Groups:
    """Return the options and parameters of each group, without what a schedule adds."""
    groups = []
    for group in optimizer.param_groups:
        options = {name: value for name, value in group.items() if name not in ("params", "initial_lr")}
        groups.append({**to_plain(options), "params": list(map(id, group["params"]))})  # sync: not during a run
    return groups
