"""Refuse, before anything is trained, what cannot work: arguments that contradict what the Trainer was given."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from tr_core.loaders import has_length
from tr_core.loss import takes_argument

if TYPE_CHECKING:
    from tr_core.trainer import Trainer

# Options that this version knows by name and does not act on: set to anything else, they are refused.
# name -> (value that is allowed, what to do instead)
NOT_YET: dict[str, tuple[Any, str]] = {
    "accelerator_config": (None, "leave it out: data is divided evenly, seeded and not dispatched"),
    "activation_checkpointing": (False, "call model.gradient_checkpointing_enable() before training"),
    "activation_checkpointing_kwargs": (None, "call model.gradient_checkpointing_enable() before training"),
    "auto_find_batch_size": (
        False,
        "lower per_device_train_batch_size and raise gradient_accumulation_steps",
    ),
    "bf16_full_eval": (False, "use bf16=True, which evaluates under autocast"),
    "dataloader_in_order": (True, "leave it at True"),
    "debug": ([], "use torch.autograd.set_detect_anomaly"),
    "deepspeed": (None, "train with strategy='ddp'"),
    "enable_jit_checkpoint": (False, "save more often with save_steps"),
    "eval_use_gather_object": (False, "return tensors from the model"),
    "fp16_full_eval": (False, "use fp16=True, which evaluates under autocast"),
    "fsdp": ([], "train with strategy='ddp'"),
    "fsdp_config": (None, "train with strategy='ddp'"),
    "include_num_input_tokens_seen": ("no", "count them in a callback"),
    "length_column_name": ("length", "leave it out: samples are not grouped by length"),
    "liger_kernel_config": (None, "patch the model before it is passed"),
    "optim_target_modules": (None, "no optimizer of this version takes target modules"),
    "parallelism_config": (None, "train with strategy='ddp'"),
    "restore_callback_states_from_checkpoint": (
        False,
        "leave it out: states of callbacks are always restored",
    ),
    "save_on_each_node": (False, "save to a file system that every machine sees"),
    "skip_memory_metrics": (True, "use torch.profiler"),
    "tf32": (None, "call torch.set_float32_matmul_precision('high')"),
    "torch_compile": (False, "pass torch.compile(model)"),
    "torch_compile_backend": (None, "pass torch.compile(model, backend=...)"),
    "torch_compile_mode": (None, "pass torch.compile(model, mode=...)"),
    "torch_empty_cache_steps": (None, "call torch.cuda.empty_cache() in a callback"),
    "use_cache": (False, "set model.config.use_cache"),
    "use_liger_kernel": (False, "patch the model before it is passed"),
}


def refuse_unsupported(args: Any) -> None:
    """Raise for options that would have no effect.

    Raises:
        NotImplementedError: one or more are set; the message names each with what to do instead.
    """
    problems = []
    for name, (allowed, instead) in NOT_YET.items():
        value = getattr(args, name, allowed)
        is_default = value in (allowed, None) or value == type(value)()
        if not is_default:
            problems.append(f"  {name}={value!r}: {instead}")
    if getattr(args, "train_sampling_strategy", "random") == "group_by_length":
        problems.append("  train_sampling_strategy='group_by_length': use 'random' or 'sequential'")
    if problems:
        raise NotImplementedError(
            "options that this version of tr-core does not act on, and what to do instead:\n" + "\n".join(problems)
        )


def check_model(model: Any, model_init: Any) -> None:
    """Raise unless exactly one of a model and a function that makes one was given."""
    if model is None and model_init is None:
        raise ValueError("Trainer needs a model or a model_init; both are None")
    if model is not None and model_init is not None:
        raise ValueError("Trainer was given a model and a model_init; pass one of them")
    if model is not None and not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}; Trainer trains a torch.nn.Module")


def check_setup(trainer: Trainer) -> None:
    """Raise where arguments ask for what the Trainer was not given, so that hours are not spent first.

    Raises:
        ValueError: the message says what is missing.
    """
    args = trainer.args
    if args.eval_strategy != "no" and trainer.eval_dataset is None and not _overrides_eval(trainer):
        raise ValueError(
            f"eval_strategy={str(args.eval_strategy)!r} evaluates during training, but eval_dataset is None; pass "
            "eval_dataset or set eval_strategy='no'"
        )
    compute = trainer.compute_metrics
    if args.batch_eval_metrics and compute is not None and not takes_argument(compute, "compute_result"):
        raise ValueError(
            "batch_eval_metrics=True calls compute_metrics(prediction, compute_result=bool) after every batch, but "
            "compute_metrics takes no compute_result"
        )
    train = trainer.train_dataset
    if train is not None and not has_length(train) and args.max_steps <= 0:
        raise ValueError(
            f"train_dataset ({type(train).__name__}) has no length and max_steps={args.max_steps}; set max_steps to "
            "the number of optimizer steps to train"
        )
    # Not before training, where checkpoints would be lost, but here.
    if args.save_strategy != "no" and train is not None:
        trainer.checkpointer()


def _overrides_eval(trainer: Trainer) -> bool:
    # A subclass that makes its own evaluation loader needs no data set here.
    return type(trainer).get_eval_dataloader.__module__ != "tr_core.trainer"
