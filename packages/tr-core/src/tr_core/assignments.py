"""Let what a user assigns to a Trainer act: at once between runs, from the next step in one, or refuse it in words.

Nothing that follows from an attribute is decided for good when the Trainer is built: what is derived is derived again
when the attribute, or an argument, was assigned.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tr_args.masking import mask_secrets

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
