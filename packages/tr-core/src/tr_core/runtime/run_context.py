"""Apply run-wide settings while a Trainer trains or evaluates, and undo them afterwards.

They are TF32, precision of evaluations, activation checkpointing, `use_cache`, checks for overflows, and
compilation.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch

from tr_args import TrainingArguments
from tr_core.runtime.activation_checkpointing import check_checkpointing_options, checkpointed_activations
from tr_core.runtime.debug import overflow_watch
from tr_core.runtime.liger import check_liger
from tr_core.runtime.memory import is_out_of_memory
from tr_core.runtime.precision import check_tf32, in_precision, tf32

if TYPE_CHECKING:
    from tr_core.trainer.trainer import Trainer

WATCH, TPU_METRICS = "underflow_overflow", "tpu_metrics_debug"

# Backends of torch.compile that run a graph without AOTAutograd. They compute checkpointed layers again with random
# numbers drawn anew: gradients belong to another dropout mask than the loss.
_REDRAWING_BACKENDS = frozenset({"eager", "eager_debug", "eager_noexcept", "pre_dispatch_eager", "ts"})

# Options -> what has to be on for them to act.
_NEEDS = {
    "activation_checkpointing_kwargs": "activation_checkpointing",
    "liger_kernel_config": "use_liger_kernel",
}


def check_conditions(args: TrainingArguments, device: torch.device) -> None:
    """Raise for what could not be set up, before anything is trained.

    Raises:
        ValueError: an option does not suit the device, torch, or another option.
        ImportError: an option needs a package that is not installed.
    """
    check_tf32(args.tf32, device)
    check_checkpointing_options(args.activation_checkpointing_kwargs)
    if args.use_liger_kernel:
        check_liger()
    for options, switch in _NEEDS.items():
        if getattr(args, options) and not getattr(args, switch):
            raise ValueError(f"{options} has no effect alone; set {switch}=True, or leave it out")
    if TPU_METRICS in args.debug and find_spec("torch_xla") is None:
        raise ImportError(
            f"debug={TPU_METRICS!r} shows the counters of torch_xla, which is not installed; install it, or leave "
            f"{TPU_METRICS} out"
        )
    if args.activation_checkpointing and args.torch_compile and args.torch_compile_backend in _REDRAWING_BACKENDS:
        raise ValueError(
            f"torch_compile_backend={args.torch_compile_backend!r} computes activations again with another dropout "
            "mask than that of the loss, which makes gradients of activation_checkpointing=True wrong; use "
            "torch_compile_backend='aot_eager' or 'inductor', or leave one of the two out"
        )
    if WATCH in args.debug and args.torch_compile:
        raise ValueError(
            f"debug={WATCH!r} looks at what passes between modules, and torch_compile=True leaves nothing between "
            "them; leave one of the two out"
        )


@contextmanager
def training_context(trainer: Trainer) -> Iterator[None]:
    """Surround a run: TF32, activation checkpointing, `use_cache`, watching for overflows, compiled calls.

    Micro-batch and accumulation, which a search for the batch size changes, are put back with the rest.
    """
    args, model, device = trainer.args, trainer.model, trainer.strategy.device
    with ExitStack() as undo:
        for name in ("per_device_train_batch_size", "gradient_accumulation_steps"):
            undo.callback(setattr, args, name, getattr(args, name))
        undo.enter_context(tf32(args.tf32))
        undo.enter_context(_use_cache(trainer))
        if args.activation_checkpointing or args.fsdp_config.get("activation_checkpointing"):
            options = args.activation_checkpointing_kwargs
            layers = undo.enter_context(checkpointed_activations(model, device, options))
            if layers:
                trainer.logger.info("activations of %d layers are computed again: %s", len(layers), ", ".join(layers))
        if WATCH in args.debug:
            undo.enter_context(overflow_watch(model))
        if trainer.compilation is not None:
            undo.enter_context(trainer.compilation.of(model, device))
        yield


@contextmanager
def evaluation_context(trainer: Trainer) -> Iterator[None]:
    """Surround an evaluation or prediction; inside training nothing is left to set up, and weights keep their type.

    Raises:
        RuntimeError: memory ran out; the message says what to lower.
    """
    args, model, device = trainer.args, trainer.model, trainer.strategy.device
    with ExitStack() as undo:
        if not trainer.is_in_train:
            undo.enter_context(tf32(args.tf32))
            if (dtype := _full_precision(args)) is not None:
                undo.enter_context(in_precision(model, dtype, trainer.label_names))
            if trainer.compilation is not None:
                undo.enter_context(trainer.compilation.of(model, device))
        try:
            yield
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            raise RuntimeError(
                f"memory ran out in an evaluation at step {trainer.state.global_step} with {args.eval_batch_size} "
                "samples a device and batch; lower per_device_eval_batch_size, or, if it is the predictions that do "
                "not fit, set eval_accumulation_steps, which moves them to the host"
            ) from error
    if TPU_METRICS in args.debug:
        trainer.logger.info("%s", import_module("torch_xla.debug.metrics").metrics_report())


def generation_context(trainer: Trainer) -> AbstractContextManager[None]:
    """Surround a generation: its calls are not compiled, for every token is one of another shape."""
    return nullcontext() if trainer.compilation is None else trainer.compilation.paused(trainer.model)


@contextmanager
def original_use_cache(trainer: Trainer) -> Iterator[None]:
    """Give the model's configuration its own `use_cache` for a block: what is saved is to be used, not trained."""
    config, given = getattr(trainer.model, "config", None), trainer.given_use_cache
    if given is None or config is None:
        yield
        return
    meanwhile, config.use_cache = config.use_cache, given
    try:
        yield
    finally:
        config.use_cache = meanwhile


@contextmanager
def _use_cache(trainer: Trainer) -> Iterator[None]:
    config: Any = getattr(trainer.model, "config", None)
    if getattr(config, "use_cache", None) is None:  # nothing that could be switched
        yield
        return
    given = trainer.given_use_cache = config.use_cache
    config.use_cache = trainer.args.use_cache
    try:
        yield
    finally:
        config.use_cache = given
        trainer.given_use_cache = None


def _full_precision(args: Any) -> torch.dtype | None:
    if args.bf16_full_eval:
        return torch.bfloat16
    return torch.float16 if args.fp16_full_eval else None
