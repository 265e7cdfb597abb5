"""Apply, between two steps, what was changed during a run: arguments, attributes of the Trainer, modules of the model.

Each argument either acts from the next step, evaluation or save on, or changing it ends the run in words.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from operator import is_not
from typing import TYPE_CHECKING, Any, cast

from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from tr_args.masking import mask_secrets
from tr_core.assignments import STRATEGIES
from tr_core.optimization.nonfinite import build_guard
from tr_core.steps import resolve_steps

if TYPE_CHECKING:
    from tr_core.run import Run
    from tr_core.trainer import Trainer

NEXT_STEP = frozenset(
    {
        "max_grad_norm",
        "logging_nan_inf_filter",
        "label_smoothing_factor",
        "average_tokens_across_devices",
        "logging_strategy",
        "logging_steps",
        "logging_first_step",
        "eval_strategy",
        "eval_steps",
        "eval_delay",
        "save_strategy",
        "save_steps",
    }
)
NEXT_EVALUATION = frozenset(
    {
        "batch_eval_metrics",
        "eval_accumulation_steps",
        "eval_do_concat_batches",
        "eval_perplexity",
        "eval_use_gather_object",
        "generation_max_length",
        "generation_num_beams",
        "include_for_metrics",
        "per_device_eval_batch_size",
        "predict_with_generate",
        "prediction_loss_only",
    }
)
NEXT_SAVE = frozenset({"save_only_model"})
END_OF_RUN = frozenset({"load_best_model_at_end"})
NEXT_RUN = frozenset(
    {
        "do_eval",
        "do_predict",
        "do_train",
        "eval_on_start",
        "ignore_data_skip",
        "overwrite_output_dir",
        "restore_callback_states_from_checkpoint",
        "resume_from_checkpoint",
    }
)
ACTING = NEXT_STEP | NEXT_EVALUATION | NEXT_SAVE | END_OF_RUN | NEXT_RUN
"""Arguments that may be changed during a run; changing any other one raises."""

_INSTEAD = {
    "learning_rate": "set group['lr'] of the optimizer's param_groups, and base_lrs of a schedule that starts from it",
    "weight_decay": "set group['weight_decay'] of the optimizer's param_groups",
    "max_steps": "set control.should_training_stop to end the run earlier; resume it with more steps for a longer one",
    "num_train_epochs": "set control.should_training_stop to end the run earlier; resume it with more for a longer one",
}
_STEPS = ("logging_steps", "eval_steps", "save_steps")


def apply_changes(trainer: Trainer, run: Run) -> None:
    """Have what was changed since the last step act, or refuse it.

    Raises:
        ValueError: an argument was changed that a run takes when it begins, or a part of the model was replaced that
            cannot be taken in; the message says what to do instead.
    """
    args = trainer.args
    check_length(trainer, run)
    changed = _changed_arguments(args, run)
    for name in changed:
        _check_change(name, run.arguments[name], getattr(args, name))
    trainer.prepare()
    for name in _STEPS:
        if name in changed:
            setattr(trainer.state, name, resolve_steps(getattr(args, name), trainer.state.max_steps))
    run.schedule = cast("Any", trainer.lr_scheduler)
    if len(run.parameters) != len(now := list(trainer.model.parameters())) or any(map(is_not, run.parameters, now)):
        _check_new_parameters(trainer, run)
        if run.guard is not None:
            run.guard.check()
            run.guard = build_guard(trainer, run)
    run.take_settings(trainer)
    if run.settings is not None:
        run.settings.note_changes()
    vars(trainer)["has_assignments"] = False
    if "max_grad_norm" in changed and getattr(run.optimizer, "updates_in_backward", False):
        cast("Any", run.optimizer).clip_to(run.max_grad_norm)


def check_length(trainer: Trainer, run: Run) -> None:
    """Raise where a callback made the run longer: epochs and schedule were planned for its length.

    Raises:
        ValueError: `state.max_steps` is larger than planned.
    """
    if trainer.state.max_steps > run.plan.max_steps:
        raise ValueError(
            f"state.max_steps was raised from {run.plan.max_steps} to {trainer.state.max_steps} during training, but "
            "the schedule and the number of epochs were planned for the former; set args.max_steps before train(), or "
            "resume the run with a larger one"
        )


def values_of_all_ranks(args: Any, optimizer: Any) -> dict[str, Any]:
    """Return what a callback may change during a run, and every rank must have alike: else weights drift apart."""
    names = ("max_grad_norm", "label_smoothing_factor", "average_tokens_across_devices")
    values = {f"args.{name}": getattr(args, name) for name in names}
    for number, group in enumerate(optimizer.param_groups):
        options = {f"{name} of parameter group {number}": group.get(name) for name in ("lr", "weight_decay")}
        values |= {name: value for name, value in options.items() if isinstance(value, int | float)}
    return values


def check_same_on_all_ranks(values: Sequence[dict[str, Any]]) -> None:
    """Raise where a rank has another value than the first.

    Raises:
        ValueError: the message names the value and what each rank has.
    """
    for name in values[0]:
        found = [of_rank.get(name) for of_rank in values]
        if any(value != found[0] for value in found):
            raise ValueError(
                f"{name} is not the same on all ranks: {found}, by rank; it was changed on some of them only, and "
                "their weights are not the same any more. Change it on every rank, in callbacks that do not ask which "
                "process they are in"
            )


@contextmanager
def watching_modules(trainer: Trainer) -> Iterator[None]:
    """Notice, inside the block, that a module or parameter was put into some model; a step costs nothing for it.

    Not where the strategy divides parameters: whole ones take their places in every forward there.
    """
    if trainer.strategy.forwards_together:
        yield
        return

    def note(module: Any, name: str, value: Any) -> None:
        vars(trainer)["has_assignments"] = True

    handles = (register_module_module_registration_hook(note), register_module_parameter_registration_hook(note))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _changed_arguments(args: Any, run: Run) -> list[str]:
    return [name for name, value in run.arguments.items() if getattr(args, name) != value]


def _check_change(name: str, before: Any, now: Any) -> None:
    shown = (mask_secrets(repr(before)), mask_secrets(repr(now))) if name != "hub_token" else ("***", "***")
    change = f"args.{name} was changed from {shown[0]} to {shown[1]} during training"
    if name not in ACTING:
        instead = _INSTEAD.get(name, "set it before train()")
        raise ValueError(f"{change}, but a run takes it when it begins, so this would change nothing; {instead}")
    if name in STRATEGIES and any(hasattr(value, "seconds") for value in (before, now)):
        raise ValueError(f"{change}: acting by the clock is set up when the Trainer is built; set it there")


def _check_new_parameters(trainer: Trainer, run: Run) -> None:
    held = {id(parameter) for group in run.optimizer.param_groups for parameter in group["params"]}
    named = trainer.model.named_parameters()
    missing = [name for name, parameter in named if parameter.requires_grad and id(parameter) not in held]
    known = {id(parameter) for parameter in run.parameters}
    new = [name for name in missing if id(trainer.model.get_parameter(name)) not in known]
    if new:
        raise ValueError(
            f"parameters were put into the model during training that no group of the optimizer holds: {new[:5]}; they "
            "would never be updated. Add them with optimizer.add_param_group, or freeze them with requires_grad_(False)"
        )
