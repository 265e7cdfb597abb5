"""Apply what a user assigns to a Trainer or its arguments, or refuse it with a message.

Between runs an assignment acts at once. During a run it acts between two steps: from the next step, evaluation or save
on. An assignment that cannot act during a run ends it with a message.

No value that depends on an attribute is fixed when the Trainer is built. It is computed again after an assignment to
the attribute or to an argument. Changed modules of the model are noticed too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from operator import is_not
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from tr_args import TrainingArguments
from tr_args.constraints import Later
from tr_args.schema import facts, facts_of_kind
from tr_core.protocols import Strategy
from tr_log.masking import MASK, is_secret, mask_secrets

# Attributes that act from the next step of a run: they determine the loss, the step and the rate.
ACTS_NEXT_STEP = frozenset(
    {
        "compute_loss_func",
        "compute_loss",
        "training_step",
        "model_accepts_loss_kwargs",
        "loss_is_scaled_for_ga",
        "compute_loss_context_manager",
        "autocast_smart_context_manager",
        "floating_point_ops",
        "lr_scheduler",
        "label_smoother",
    }
)

_BEFORE = "assign it before train()"
# Attributes that a run reads at its beginning -> what to do about them during the run.
TAKEN_AT_BEGIN: dict[str, str] = {
    "model": "change the weights or replace parts of the model in place, or end this run and begin another",
    "args": "assign to its attributes (trainer.args.max_grad_norm = 0.5)",
    "train_dataset": "change what the data set gives by its set_epoch(epoch), which every epoch calls",
    "data_collator": "have the collator itself look at what changes",
    "optimizer": "change the options in its param_groups, or call its add_param_group",
    "strategy": _BEFORE,
    "callback_handler": "call trainer.add_callback or remove_callback, or assign to its list callbacks",
    "model_init": _BEFORE,
    "optimizer_cls_and_kwargs": _BEFORE,
    "create_optimizer": _BEFORE,
    "create_scheduler": _BEFORE,
    "create_optimizer_and_scheduler": _BEFORE,
    "get_train_dataloader": _BEFORE,
}


def check_as_built(args: TrainingArguments, built_with: Mapping[str, Any]) -> None:
    """Raise if an argument that a Trainer was built with has changed."""
    now = values_when_built(args)
    changed = [name for name in built_with if now[name] != built_with[name]]
    if changed:
        shown = ", ".join(
            f"{name} from {_shown(name, built_with[name])} to {_shown(name, now[name])}" for name in changed
        )
        raise ValueError(
            f"arguments were changed that a Trainer reads when it is built: {shown}; set them before, or build a new "
            "Trainer with these arguments"
        )


def check_same_process(assigned: Strategy, built_with: Strategy) -> None:
    """Raise if a strategy that is assigned to a Trainer is for another device or number of processes."""
    now, then = (f"rank {s.rank} of {s.world_size} on {s.device}" for s in (assigned, built_with))
    if now != then:
        raise ValueError(
            f"trainer.strategy was assigned a strategy of {now}, and this Trainer was built for {then}; build a new "
            "Trainer with it: Trainer(..., strategy=...)"
        )


def values_when_built(args: TrainingArguments) -> dict[str, Any]:
    """Return the arguments from which a Trainer builds its parts, as plain values."""
    values = args.to_dict()
    found = {name: values[name] for name in facts(type(args), Later.NEW_TRAINER) if name in values}
    found |= {f"{name} by the clock": _wall_time(getattr(args, name)) for name in STRATEGIES}
    return found | {"hub_token": args.hub_token, "parameter_rules set": bool(args.parameter_rules)}


STRATEGIES = ("logging_strategy", "eval_strategy", "save_strategy")


def _wall_time(interval: Any) -> Any:
    """Return the seconds of a wall-time strategy, which has its own callback; None for any other strategy."""
    return getattr(interval, "seconds", None)


def _shown(name: str, value: Any) -> str:
    return MASK if is_secret(name, value) else mask_secrets(repr(value))


_INSTEAD = {
    "learning_rate": "set group['lr'] of the optimizer's param_groups, and base_lrs of a schedule that starts from it",
    "weight_decay": "set group['weight_decay'] of the optimizer's param_groups",
    "max_steps": "set control.should_training_stop to end the run earlier; resume it with more steps for a longer one",
    "num_train_epochs": "set control.should_training_stop to end the run earlier; resume it with more for a longer one",
}


def values_of_all_ranks(args: TrainingArguments, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the values that a callback may change during a run; if they differ between ranks, weights drift apart."""
    names = ("max_grad_norm", "label_smoothing_factor", "average_tokens_across_devices")
    values = {f"args.{name}": getattr(args, name) for name in names}
    for number, group in enumerate(optimizer.param_groups):
        options = {f"{name} of parameter group {number}": group.get(name) for name in ("lr", "weight_decay")}
        values |= {name: value for name, value in options.items() if isinstance(value, int | float)}
    return values


def check_same_on_all_ranks(values: Sequence[dict[str, Any]]) -> None:
    """Raise if a rank has another value than the first rank."""
    if all(map(values[0].__eq__, values)):
        return
    for name in values[0]:
        found = [of_rank.get(name) for of_rank in values]
        if any(value != found[0] for value in found):
            raise ValueError(
                f"{name} is not the same on all ranks: {found}, by rank; it was changed on some of them only, and "
                "their weights no longer agree. Change it on every rank, in callbacks that do not ask which "
                "process they are in"
            )


@contextmanager
def assigned(thing: object, **values: Any) -> Iterator[None]:
    """Set attributes of an object for a block, without the effects of a user's assignment."""
    before = {name: getattr(thing, name) for name in values}
    vars(thing).update(values)
    try:
        yield
    finally:
        vars(thing).update(before)


@contextmanager
def watching_modules(note: Callable[[], None]) -> Iterator[None]:
    """Call a function when a module or parameter is put into any model inside the block; a step costs nothing.

    Not for a strategy that shards parameters: full parameters replace the shards in every forward there.
    """

    def changed(module: Any, name: str, value: Any) -> None:
        note()

    handles = (
        register_module_module_registration_hook(changed),
        register_module_parameter_registration_hook(changed),
    )
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class ChangeWatch:
    """Record what a user may change during a run, and find the changes.

    Args:
        clears_gradients: whether the strategy clears the gradients of all parameters itself.

    Attributes:
        seen: number of assignments to the arguments, False, and number of the optimizer's groups; the loop compares
            them.
        outside: parameters that the optimizer does not hold, by name.
    """

    def __init__(
        self,
        args: TrainingArguments,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        clears_gradients: bool,
    ) -> None:
        self._clears_gradients = clears_gradients
        self.note(args, model, optimizer)
        self._leaves_out_by_choice = any(p.requires_grad for p in self.outside.values())

    def note(self, args: TrainingArguments, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Record the current arguments, model and optimizer."""
        self.note_arguments(args, optimizer)
        self._parameters = list(model.parameters())
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        named = {} if self._clears_gradients else dict(model.named_parameters())
        self.outside = {name: parameter for name, parameter in named.items() if id(parameter) not in held}

    def note_arguments(self, args: TrainingArguments, optimizer: torch.optim.Optimizer) -> None:
        """Record the arguments only: a change by the loop itself is no change by the user."""
        self._arguments = {field.name: getattr(args, field.name) for field in fields(args) if field.init}
        self.seen = (args.num_assignments, False, len(optimizer.param_groups))

    def changed_arguments(self, args: TrainingArguments) -> list[str]:
        """Return the names of the arguments that have changed.

        Raise ValueError if a run reads one of them only at its beginning.
        """
        changed = [name for name, value in self._arguments.items() if getattr(args, name) != value]
        acts = facts_of_kind(type(args), Later)
        for name in changed:
            _check_change(name, self._arguments[name], getattr(args, name), acts.get(name))
        return changed

    def has_other_parameters(self, model: nn.Module) -> bool:
        """Whether the model has more, fewer or other parameters."""
        now = list(model.parameters())
        return len(self._parameters) != len(now) or any(map(is_not, self._parameters, now))

    def check_new_parameters(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Raise if the model has new trainable parameters that no optimizer would update."""
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        known = {id(parameter) for parameter in self._parameters}
        new = [
            name
            for name, parameter in model.named_parameters()
            if parameter.requires_grad and id(parameter) not in held and id(parameter) not in known
        ]
        if new:
            raise ValueError(
                f"parameters were put into the model during training that no group of the optimizer holds: {new[:5]}; "
                "they would never be updated. Add them with optimizer.add_param_group, or freeze them with "
                "requires_grad_(False)"
            )

    def clear_outside(self) -> None:
        """Clear the gradients of parameters that no optimizer holds: they would add up from step to step.

        Raises:
            ValueError: the optimizer held all trainable parameters, and one was unfrozen that it does not hold.
        """
        for name, parameter in self.outside.items():
            if parameter.grad is not None:
                if not self._leaves_out_by_choice:
                    raise ValueError(_unfrozen(name))
                parameter.grad = None


def _check_change(name: str, before: Any, now: Any, acts: Later | None) -> None:
    change = f"args.{name} was changed from {_shown(name, before)} to {_shown(name, now)} during training"
    if acts in (None, Later.NEW_TRAINER):
        instead = _INSTEAD.get(name, "set it before train()")
        raise ValueError(
            f'{change}; only those that docs/arguments.md of tr-args calls "changed later" may be; {instead}'
        )
    if name in STRATEGIES and any(hasattr(value, "seconds") for value in (before, now)):
        raise ValueError(f"{change}: acting by the clock is set up when the Trainer is built; set it there")


def _unfrozen(name: str) -> str:
    return (
        f"the parameter {name} was unfrozen during training: it has a gradient, but is in no "
        "group of the optimizer, which holds those that were trainable when training began, and would never be "
        "updated. Add it with optimizer.add_param_group, or begin with it trainable and freeze it in on_train_begin"
    )
