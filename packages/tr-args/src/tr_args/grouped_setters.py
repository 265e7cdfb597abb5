"""Set the arguments of one topic together."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Self

from tr_args.conversion import convert_field
from tr_args.errors import ArgumentsError, Problem, RefusedError
from tr_args.schema import schema


class _Default:
    """The default of a parameter, as `help` shows it: that of the argument it sets."""

    def __repr__(self) -> str:
        return "the argument's default"


_DEFAULT, _EMPTY = _Default(), inspect.Parameter.empty


def _setter(name: str, doc: str, parameters: str, *, prefix: str = "", switch: str = "") -> Callable[..., Any]:
    """Return a method that sets each of its parameters as an argument, and the others to the arguments' defaults.

    Args:
        name: its name.
        doc: its docstring.
        parameters: their names, in order. `name=argument` sets that argument, others that of their name behind
            `prefix`. A name that begins with `!` must be given.
        prefix: what the arguments' names begin with.
        switch: an argument that is set to True.
    """
    pairs = [text.partition("=")[::2] for text in parameters.split()]
    arguments = {key.lstrip("!"): field or prefix + key.lstrip("!") for key, field in pairs}
    required = {key[1:] for key, _ in pairs if key.startswith("!")}

    def setter(self: GroupedSetters, *values: Any, **named: Any) -> Any:
        try:
            given = signature.bind(self, *values, **named).arguments
        except TypeError as error:
            raise TypeError(f"{name}() {error}") from None
        values_of = {field: given.get(key, _DEFAULT) for key, field in arguments.items()}
        return self._set(values_of, switch)

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    shown = [inspect.Parameter(key, kind, default=_EMPTY if key in required else _DEFAULT) for key in arguments]
    signature = inspect.Signature([inspect.Parameter("self", kind), *shown])
    setter.__name__, setter.__qualname__, setter.__doc__ = name, f"GroupedSetters.{name}", doc
    setter.__signature__ = signature  # pyright: ignore[reportFunctionMemberAccess]
    return setter


class GroupedSetters:
    """Methods that set a topic's arguments at once and return the object.

    Arguments that are not given are set to their defaults. All values are checked alone, and none is set if one does
    not fit. `check` checks them together.
    """

    set_training = _setter(
        "set_training",
        "Set learning rate, batch size, length and the like of a training run, and `do_train`.",
        "learning_rate batch_size=per_device_train_batch_size weight_decay num_epochs=num_train_epochs max_steps "
        "gradient_accumulation_steps seed activation_checkpointing",
        switch="do_train",
    )
    set_evaluate = _setter(
        "set_evaluate",
        "Set when and how evaluation happens; `do_eval` follows the strategy. `steps` is 500 by default.",
        "strategy steps batch_size=per_device_eval_batch_size accumulation_steps delay loss_only=prediction_loss_only",
        prefix="eval_",
    )
    set_testing = _setter(
        "set_testing",
        "Set how predictions are made, and `do_predict`.",
        "batch_size=per_device_eval_batch_size loss_only=prediction_loss_only",
        switch="do_predict",
    )
    set_save = _setter(
        "set_save",
        "Set when checkpoints are written and how many are kept.",
        "strategy steps total_limit on_each_node",
        prefix="save_",
    )
    set_logging = _setter(
        "set_logging",
        "Set when, where and how much is logged.",
        "strategy steps report_to=report_to level=log_level first_step nan_inf_filter on_each_node=log_on_each_node "
        "replica_level=log_level_replica",
        prefix="logging_",
    )
    set_push_to_hub = _setter(
        "set_push_to_hub",
        "Set where and when to upload, and `push_to_hub`.",
        "!model_id strategy token private_repo always_push revision",
        prefix="hub_",
        switch="push_to_hub",
    )
    set_optimizer = _setter(
        "set_optimizer",
        "Set the optimizer and its options.",
        "name=optim learning_rate weight_decay beta1=adam_beta1 beta2=adam_beta2 epsilon=adam_epsilon args=optim_args",
    )
    set_lr_scheduler = _setter(
        "set_lr_scheduler",
        "Set the schedule and its length.",
        "name=lr_scheduler_type num_epochs=num_train_epochs max_steps warmup_steps",
    )
    set_dataloader = _setter(
        "set_dataloader",
        "Set how batches are made.",
        "train_batch_size=per_device_train_batch_size eval_batch_size=per_device_eval_batch_size drop_last num_workers "
        "pin_memory persistent_workers prefetch_factor multiprocessing_context in_order "
        "auto_find_batch_size=auto_find_batch_size ignore_data_skip=ignore_data_skip sampler_seed=data_seed",
        prefix="dataloader_",
    )

    def _set(self, values: dict[str, Any], switch: str) -> Self:
        """Set all values, or none if one is refused."""
        fields = schema(type(self))
        # The default of eval_steps follows logging_steps, but only when the arguments are made.
        defaults = {name: 500 if name == "eval_steps" else fields[name].make_default() for name in values}
        values = {name: defaults[name] if value is _DEFAULT else value for name, value in values.items()}
        if switch:
            values[switch] = True
        if "eval_strategy" in values:
            values["do_eval"] = str(values["eval_strategy"]) != "no"
        problems: list[Problem] = []
        for name, value in values.items():
            try:
                convert_field(fields[name], value)
            except RefusedError as refusal:
                shown = "***" if fields[name].hides(value) else value
                problems.append(Problem(name, shown, str(refusal), "assignment"))
        if problems:
            raise ArgumentsError(problems)
        for name, value in values.items():
            setattr(self, name, value)
        return self
