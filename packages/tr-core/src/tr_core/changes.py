"""Apply what a user assigns to a Trainer or its arguments, or refuse it with a message.

Between runs an assignment acts at once. During a run it acts between two steps: from the next step, evaluation or save
on. Whatever cannot act during a run ends it with a message.

No value that depends on an attribute is fixed when the Trainer is built. It is computed again after an assignment to
the attribute or to an argument. Changed modules of the model are noticed too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import is_not
from typing import TYPE_CHECKING, Any, cast

from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from tr_args.masking import mask_secrets
from tr_core.optim.nonfinite import build_guard
from tr_core.plan import resolve_steps

if TYPE_CHECKING:
    from tr_core.run import Run
    from tr_core.trainer.trainer import Trainer

# Attributes that act from the next step of a run on: what makes the loss, the step and the rate.
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
    }
)

_BEFORE = "assign it before train()"
# Attributes that a run takes when it begins -> what to do about them in its middle.
TAKEN_AT_BEGIN: dict[str, str] = {
    "model": "change the weights or replace parts of the model in place, or end this run and begin another",
    "args": "assign to its attributes (trainer.args.max_grad_norm = 0.5)",
    "train_dataset": "change what the data set gives by its set_epoch(epoch), which every epoch calls",
    "data_collator": "have the collator itself look at what changes",
    "optimizer": "change the options in its param_groups, or call its add_param_group",
    "model_init": _BEFORE,
    "optimizer_cls_and_kwargs": _BEFORE,
    "create_optimizer": _BEFORE,
    "create_scheduler": _BEFORE,
    "create_optimizer_and_scheduler": _BEFORE,
    "get_train_dataloader": _BEFORE,
}

# Arguments of which a Trainer makes its parts when it is built.
_PARTS = (
    "accelerator_config",
    "bf16",
    "ddp_backend",
    "ddp_broadcast_buffers",
    "ddp_bucket_cap_mb",
    "ddp_find_unused_parameters",
    "ddp_static_graph",
    "ddp_timeout",
    "deepspeed",
    "disable_tqdm",
    "ema_decay",
    "ema_start_step",
    "ema_update_steps",
    "fast_dev_run",
    "fp16",
    "fsdp",
    "fsdp_config",
    "generation_config",
    "hub_always_push",
    "hub_model_id",
    "hub_private_repo",
    "hub_revision",
    "hub_strategy",
    "hub_token",
    "local_rank",
    "log_level",
    "log_level_replica",
    "log_on_each_node",
    "logging_dir",
    "max_time",
    "neftune_length",
    "neftune_noise_alpha",
    "parallelism_config",
    "push_to_hub",
    "report_to",
    "run_name",
    "skip_memory_metrics",
    "strategy",
    "torch_compile",
    "torch_compile_backend",
    "torch_compile_mode",
    "torch_empty_cache_steps",
    "use_cpu",
    "use_liger_kernel",
    "liger_kernel_config",
)
FIXED_WHEN_BUILT = frozenset(_PARTS)


def check_as_built(args: Any, built_with: Mapping[str, Any]) -> None:
    """Raise where an argument that a Trainer was built with is another one now.

    Args:
        args: the arguments as they are.
        built_with: what `values_when_built` returned when the Trainer was built.

    Raises:
        ValueError: the message names each with both values.
    """
    now = values_when_built(args)
    changed = [name for name in built_with if now[name] != built_with[name]]
    if changed:
        shown = ", ".join(f"{name} from {_shown(name, built_with)} to {_shown(name, now)}" for name in changed)
        raise ValueError(
            f"arguments were changed that a Trainer reads when it is built: {shown}; set them before, or build a new "
            "Trainer with these arguments"
        )


def values_when_built(args: Any) -> dict[str, Any]:
    """Return the arguments that a Trainer makes its parts of, as plain values."""
    values = args.to_dict()
    found = {name: values[name] for name in sorted(FIXED_WHEN_BUILT) if name in values}
    found |= {f"{name} by the clock": _wall_time(getattr(args, name)) for name in STRATEGIES}
    return found | {"hub_token": args.hub_token, "parameter_rules set": bool(args.parameter_rules)}


STRATEGIES = ("logging_strategy", "eval_strategy", "save_strategy")


def _wall_time(strategy: Any) -> Any:
    """Return the seconds of a strategy of wall time, which a callback of its own follows; None for any other."""
    return getattr(strategy, "seconds", None)


def _shown(name: str, values: Mapping[str, Any]) -> str:
    return "***" if name == "hub_token" else mask_secrets(repr(values[name]))


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
