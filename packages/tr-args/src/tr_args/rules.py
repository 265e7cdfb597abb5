"""Fill in arguments whose values follow from others, and find arguments that contradict each other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from tr_args.checked import Rule
from tr_args.fields import AllFields
from tr_args.fields.hardware import PrecisionFields
from tr_args.fields.training import DataFields, RegularizationFields
from tr_args.types.choices import IntervalStrategy, MetricSchedule, SaveStrategy
from tr_args.types.sharding import WITHIN_SAMPLES

_METRIC_SCHEDULES = tuple(MetricSchedule)


def fill_defaults(args: AllFields, follow: Callable[[str, Any], None]) -> None:
    """Fill in arguments that follow from others; `follow` sets one of them, unless it was assigned."""
    if args.eval_strategy != IntervalStrategy.NO:
        follow("do_eval", True)
    if args.eval_steps is None:
        follow("eval_steps", args.logging_steps)
    if args.disable_tqdm is None:
        follow("disable_tqdm", args.log_level in ("error", "critical"))
    if args.use_cpu:
        follow("dataloader_pin_memory", False)
    if args.torch_compile_backend is not None or args.torch_compile_mode is not None:
        follow("torch_compile", True)
    if args.torch_compile and args.torch_compile_backend is None:
        follow("torch_compile_backend", "inductor")
    if args.metric_for_best_model is None and watches_metric(args):
        follow("metric_for_best_model", "loss")
    if args.greater_is_better is None and args.metric_for_best_model is not None:
        follow("greater_is_better", not args.metric_for_best_model.endswith(("loss", "perplexity")))


def watches_metric(args: AllFields) -> bool:
    """Return whether training compares models by a metric."""
    return (
        args.load_best_model_at_end
        or args.save_strategy == SaveStrategy.BEST
        or args.lr_scheduler_type in _METRIC_SCHEDULES
    )


_EVALUATE = "needs evaluations; set eval_strategy to 'steps', 'epoch' or a time"


def conflicts(args: AllFields) -> Iterator[Rule]:
    """Yield the names of arguments that contradict each other, and what to change."""
    for rule in _RULES:
        yield from rule(args)


def without_effect(args: AllFields) -> Iterator[Rule]:
    """Yield the name of an argument that has no effect beside others, theirs, and what to change."""
    for rule in _RULES_OF_EFFECT:
        yield from rule(args)


def _precision(args: PrecisionFields) -> Iterator[Rule]:
    if args.bf16 and args.fp16:
        yield ("bf16", "fp16"), "only one can be on; turn the other off"
    if args.bf16_full_eval and args.fp16_full_eval:
        yield ("bf16_full_eval", "fp16_full_eval"), "only one can be on; turn the other off"


def _intervals(args: AllFields) -> Iterator[Rule]:
    for topic in ("logging", "eval", "save"):
        strategy, steps = f"{topic}_strategy", f"{topic}_steps"
        if getattr(args, strategy) == "steps" and not getattr(args, steps):
            yield (steps, strategy), f"needs at least 1 step, or a ratio below 1; or set {strategy}='no'"


def _loading(args: DataFields) -> Iterator[Rule]:
    if args.dataloader_num_workers:
        return
    for name in (
        "dataloader_prefetch_factor",
        "dataloader_persistent_workers",
        "dataloader_multiprocessing_context",
    ):
        if getattr(args, name):
            yield (
                (name, "dataloader_num_workers"),
                "needs loading processes; set dataloader_num_workers to 1 or more",
            )


def _evaluation(args: AllFields) -> Iterator[Rule]:
    if args.eval_strategy != "no":
        return
    if args.lr_scheduler_type in _METRIC_SCHEDULES:
        yield ("lr_scheduler_type", "eval_strategy"), _EVALUATE
    if args.save_strategy == "best":
        yield ("save_strategy", "eval_strategy"), _EVALUATE
    elif args.load_best_model_at_end:
        yield ("load_best_model_at_end", "eval_strategy"), _EVALUATE


def _perplexity(args: AllFields) -> Iterator[Rule]:
    if args.eval_perplexity and args.label_smoothing_factor:
        needed = "needs the loss of the labels as they are; turn one of the two off"
        yield ("eval_perplexity", "label_smoothing_factor"), needed


def _best_model(args: AllFields) -> Iterator[Rule]:
    # Evaluations and saves may be due at different steps: a new best model is saved at once.
    if args.load_best_model_at_end and args.save_strategy == "no" and args.eval_strategy != "no":
        yield ("load_best_model_at_end", "save_strategy"), "needs checkpoints; set save_strategy, such as to 'best'"


def _average(args: RegularizationFields) -> Iterator[Rule]:
    if args.ema_decay is not None:
        return
    for name, unset in (("ema_start_step", 0), ("ema_update_steps", 1)):
        if getattr(args, name) != unset:
            yield (name, "ema_decay"), "has no effect alone; set ema_decay, such as ema_decay=0.999"


def _noise(args: RegularizationFields) -> Iterator[Rule]:
    if args.neftune_length != "real" and not args.neftune_noise_alpha:
        yield ("neftune_length", "neftune_noise_alpha"), "has no effect alone; set neftune_noise_alpha, such as to 5"


def _sharding(args: AllFields) -> Iterator[Rule]:
    if args.fsdp and args.deepspeed:
        yield ("fsdp", "deepspeed"), "only one can shard the model; leave the other out"
    # Strategies of other names may support these options.
    if args.fsdp and args.strategy in ("single", "ddp", "deepspeed"):
        yield ("fsdp", "strategy"), "needs strategy='fsdp' or 'auto'"
    if args.deepspeed and args.strategy in ("single", "ddp", "fsdp"):
        yield ("deepspeed", "strategy"), "needs strategy='deepspeed' or 'auto'"
    if args.fsdp_config.get("min_num_params") and args.fsdp_config.get("transformer_layer_cls_to_wrap"):
        yield ("fsdp_config",), "needs either min_num_params or transformer_layer_cls_to_wrap, not both"


def _parallelism(args: AllFields) -> Iterator[Rule]:
    sizes = args.parallelism_config or {}
    if sizes and args.deepspeed:
        words = "is not read with ZeRO, whose configuration says how it divides; leave deepspeed out; shard by fsdp"
        yield ("parallelism_config", "deepspeed"), words
    together = " and ".join(name for name in (*WITHIN_SAMPLES, "ep_size") if sizes.get(name, 1) > 1)
    if together and args.strategy not in ("auto", "mesh"):
        yield ("parallelism_config", "strategy"), f"divides a model by {together} with strategy='mesh' or 'auto'"
    if together and args.accelerator_config.split_batches:
        yield ("parallelism_config", "accelerator_config"), f"has no batches to split with {together}; give a replica's"
    if sizes.get("dp_shard_size", 1) > 1 and not args.fsdp and args.strategy in ("auto", "single", "ddp"):
        yield ("parallelism_config", "fsdp"), "divides a model by dp_shard_size; set fsdp='full_shard auto_wrap' too"


def _rewind(args: AllFields) -> Iterator[Rule]:
    if args.on_spike is None:
        return
    if args.on_nonfinite != "log":
        yield ("on_spike", "on_nonfinite"), "leaves out steps that are not finite by itself; leave on_nonfinite out"
    others = ("fp16", "deepspeed", "step_compile")
    if refused := [name for name in others if getattr(args, name) not in (None, False, "off")]:
        yield ("on_spike", *refused), "cannot go back there; leave the others out"


def _elastic(args: AllFields) -> Iterator[Rule]:
    shards = args.virtual_shards
    if args.elastic is None:
        if shards is not None:
            yield ("virtual_shards", "elastic"), "has no effect alone; set elastic='bitwise'"
        return
    if shards is None or shards & (shards - 1):
        yield ("elastic", "virtual_shards"), "needs a power of two: the most processes that the run may ever have"
    if args.strategy not in ("auto", "single", "ddp", "fsdp"):
        yield ("elastic", "strategy"), "is done by strategy='auto', 'ddp' or 'fsdp'"
    others = ("fp16", "deepspeed", "parallelism_config", "auto_find_batch_size", "overfit_batches")
    others += ("ddp_find_unused_parameters", "step_compile", "torch_compile", "fast_dev_run")
    others += ("neftune_noise_alpha", "batch_eval_metrics", "ddp_bucket_cap_mb", "ddp_static_graph")
    if refused := [name for name in others if getattr(args, name) not in (None, False, "off")]:
        yield ("elastic", *refused), "do not work together; leave the others out"
    if not args.average_tokens_across_devices:
        yield ("elastic", "average_tokens_across_devices"), "a step's targets are counted over all shards; leave it out"
    if (args.accelerator_config.gradient_accumulation_kwargs or {}).get("sync_each_batch"):
        yield ("elastic", "accelerator_config"), "gradients are exchanged once a shard: leave sync_each_batch out"


def _plans(args: AllFields) -> Iterator[Rule]:
    sizes = args.parallelism_config or {}
    if args.tp_plan and sizes.get("tp_size", 1) == 1:
        yield ("tp_plan", "parallelism_config"), "says what tp_size divides; set tp_size too"
    if args.ep_plan and sizes.get("ep_size", 1) == 1:
        yield ("ep_plan", "parallelism_config"), "says what ep_size shares out; set ep_size too"
    if (args.pp_split or args.pp_schedule != "1f1b") and sizes.get("pp_size", 1) == 1:
        yield ("pp_split", "pp_schedule", "parallelism_config"), "say how pp_size divides a model; set pp_size too"


def _sharding_options(args: AllFields) -> Iterator[Rule]:
    if args.fsdp_config and not args.fsdp and args.strategy in ("auto", "single", "ddp"):
        yield ("fsdp_config", "fsdp"), "has no effect alone; set fsdp, such as fsdp='full_shard auto_wrap'"


_RULES: tuple[Callable[[AllFields], Iterator[Rule]], ...] = (
    _precision,
    _intervals,
    _evaluation,
    _perplexity,
    _best_model,
    _sharding,
    _parallelism,
    _elastic,
    _rewind,
    _plans,
)
_RULES_OF_EFFECT: tuple[Callable[[AllFields], Iterator[Rule]], ...] = (_loading, _average, _noise, _sharding_options)
