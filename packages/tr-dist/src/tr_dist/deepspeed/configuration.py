"""Read a DeepSpeed configuration, fill in `auto` from the arguments, and refuse contradictions."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from tr_log.bounded_text import ContentError, load_json, read_text

AUTO = "auto"
_TOLERANCE = 1e-12  # for numbers that went through JSON

# Schedules of a configuration, with the Trainer's names; the Trainer computes them.
_SCHEDULES = {
    "WarmupLR": ("constant_with_warmup", "constant"),
    "WarmupDecayLR": ("linear",),
    "WarmupCosineLR": ("cosine",),
}
# Optimizers that a configuration's own may replace: nobody selects these by name.
_REPLACEABLE = ("adamw_torch", "adamw_torch_fused")
_NEEDS_MATRICES = ("galore", "lomo", "adalomo", "apollo", "fira", "q_galore")
_OFFLOADS = ("offload_optimizer", "offload_param")
# Path of a setting -> why it is refused, and what to do.
_REFUSED = {
    "amp.enabled": "Apex's mixed precision is not used; set bf16.enabled or fp16.enabled",
    "scheduler": "it is not stepped here; step a schedule of torch.optim.lr_scheduler over the optimizer",
    "gradient_clipping": "each step says by how much: clip_grad_norm(model, optimizer, max_norm)",
    "checkpoint.load_universal": "checkpoints are tr-ckpt's, which load on any number of ranks as they are",
}


@dataclass(frozen=True)
class Setting:
    """The expected value of one setting of a configuration.

    Attributes:
        path: of the setting, joined by dots.
        value: the value of the arguments.
        meaning: the names of these arguments.
        absent: the value of the setting if it is left out; None fills it in.
    """

    path: str
    value: Any
    meaning: str
    absent: Any = None


def read_configuration(source: Mapping[str, Any] | str | Path | None) -> dict[str, Any]:
    """Return a configuration as a new dict: a copy of a mapping, or the content of a JSON file.

    Raises:
        ValueError: there is none, the file does not exist, or it is not a JSON object.
    """
    if not source:
        raise ValueError(
            "strategy='deepspeed' needs a configuration: deepspeed={'zero_optimization': {'stage': 2}}, or the path of "
            "a JSON file"
        )
    if isinstance(source, Mapping):
        return copy.deepcopy(dict(source))
    try:
        found = load_json(read_text(source))
    except ContentError as error:
        raise ValueError(f"the DeepSpeed configuration {source} {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"the DeepSpeed configuration {source} holds a {type(found).__name__}; it must be an object")
    return found


def fill_from_arguments(configuration: dict[str, Any], args: Any, world_size: int) -> dict[str, Any]:
    """Return a configuration with the values of training arguments in place of `auto`.

    The loop handles `scheduler` and `gradient_clipping` from the same arguments, so both are removed.

    Raises:
        ValueError: it contradicts the arguments; the message lists every such setting.
    """
    filled = copy.deepcopy(configuration)
    problems = [*_of_optimizer(filled, args), *_of_schedule(filled, args)]
    for setting in _settings(filled, args, world_size):
        problems += _fill(filled, setting)
    if problems:
        listed = "\n".join(f"  {problem}" for problem in problems)
        raise ValueError(
            "the DeepSpeed configuration and the training arguments disagree; write 'auto' in the former, or change "
            f"one of the two:\n{listed}"
        )
    for name in ("scheduler", "gradient_clipping"):  # the Trainer handles both from the arguments
        filled.pop(name, None)
    return filled


def fill_from_model(configuration: dict[str, Any], model: nn.Module) -> dict[str, Any]:
    """Return a configuration with sizes from the model's hidden size in place of `auto`.

    Raises:
        ValueError: the model has no hidden size; or another setting is still `auto`.
    """
    filled = copy.deepcopy(configuration)
    zero = filled.get("zero_optimization", {})
    sizes = {
        "reduce_bucket_size": lambda hidden: hidden * hidden,
        "stage3_prefetch_bucket_size": lambda hidden: int(0.9 * hidden * hidden),
        "stage3_param_persistence_threshold": lambda hidden: 10 * hidden,
    }
    if wanted := [name for name in sizes if zero.get(name) == AUTO]:
        hidden = _hidden_size(getattr(model, "config", None))
        if hidden is None:
            named = ", ".join(f"zero_optimization.{name}" for name in wanted)
            raise ValueError(
                f"the DeepSpeed configuration has {named} = 'auto', which is computed from the model's "
                f"config.hidden_size, and {type(model).__name__} has none; give numbers"
            )
        zero.update({name: sizes[name](hidden) for name in wanted})
    if left := list(_left_open(filled, ())):
        raise ValueError(
            f"the DeepSpeed configuration has {', '.join(left)} = 'auto', which nothing gives a value to; write one, "
            "or leave it out"
        )
    return filled


def check_configuration(configuration: Mapping[str, Any]) -> None:
    """Refuse unsupported settings.

    Raises:
        ValueError: the message lists each with what to do instead.
    """
    problems = [f"{path}: {why}" for path, why in _REFUSED.items() if look_up(configuration, path)]
    stage = stage_of(configuration)
    if stage not in (0, 1, 2, 3):
        problems.append(f"zero_optimization.stage={stage!r}: it is 0, 1, 2 or 3")
    for name in _OFFLOADS:
        problems += _of_placement(name, look_up(configuration, f"zero_optimization.{name}") or {}, stage)
    if stage == 0 and low_precision(configuration) is not None:
        problems.append(
            f"zero_optimization.stage=0 with {low_precision(configuration)}: use stage 1, which also divides the "
            "float32 parameters that this needs, or strategy='ddp'"
        )
    if problems:
        raise ValueError("the DeepSpeed configuration cannot be used:\n" + "\n".join(f"  {p}" for p in problems))


def check_optimizer_name(name: str, stage: int) -> None:
    """Refuse, by its name, an optimizer that needs matrices where DeepSpeed has flat buffers.

    What else an optimizer cannot do with DeepSpeed is seen in itself, by `tr_dist.deepspeed.engine.check_optimizer`.

    Raises:
        ValueError: it is one, and the stage has.
    """
    if stage and name.startswith((*_NEEDS_MATRICES, "adafactor")):
        raise ValueError(
            f"optim={name!r} needs each parameter as a matrix, where DeepSpeed (here ZeRO stage {stage}) has flat "
            "buffers; use strategy='fsdp' (fsdp='full_shard auto_wrap') or strategy='ddp', or another optimizer"
        )


def stage_of(configuration: Mapping[str, Any]) -> Any:
    """Return the stage of ZeRO; 0 if none is given."""
    return look_up(configuration, "zero_optimization.stage") or 0


def low_precision(configuration: Mapping[str, Any]) -> str | None:
    """Return `bf16` or `fp16` if the configuration turns it on."""
    return next((name for name in ("bf16", "fp16") if look_up(configuration, f"{name}.enabled")), None)


def look_up(configuration: Mapping[str, Any], path: str) -> Any:
    """Return the setting at a dotted path; None if there is none."""
    found: Any = configuration
    for step in path.split("."):
        found = found.get(step) if isinstance(found, Mapping) else None
    return found


def _of_placement(name: str, section: Mapping[str, Any], stage: Any) -> Iterator[str]:
    """Yield what is wrong with the offload of one section of `zero_optimization`."""
    place, where = section.get("device"), f"zero_optimization.{name}"
    if place == "nvme":
        yield f"{where}.device='nvme': nothing is swapped to a disk; use device='cpu', or strategy='fsdp' on more ranks"
    elif place not in (None, "none", "cpu"):
        yield f"{where}.device={place!r}: it is 'none' or 'cpu'"
    elif place == "cpu" and stage == 0:
        yield f"{where}: nothing is divided at stage 0; use stage 1, 2 or 3"
    elif place == "cpu" and stage != 3 and name == "offload_param":
        yield f"{where}.device='cpu': needs stage 3, not {stage}"


def _settings(filled: dict[str, Any], args: Any, world_size: int) -> Iterator[Setting]:
    micro, accumulation = args.per_device_train_batch_size, args.gradient_accumulation_steps
    yield Setting("train_micro_batch_size_per_gpu", micro, "per_device_train_batch_size")
    yield Setting("gradient_accumulation_steps", accumulation, "gradient_accumulation_steps")
    product = f"per_device_train_batch_size x gradient_accumulation_steps x {world_size} processes"
    yield Setting("train_batch_size", micro * accumulation * world_size, product)
    yield Setting("gradient_clipping", float(args.max_grad_norm or 0), "max_grad_norm")
    yield Setting("fp16.enabled", bool(args.fp16), "fp16")
    yield Setting("bf16.enabled", bool(args.bf16), "bf16")
    if "optimizer" in filled:
        yield Setting("optimizer.params.lr", args.learning_rate, "learning_rate")
        yield Setting("optimizer.params.weight_decay", args.weight_decay, "weight_decay")
        is_adam = "adam" in str(look_up(filled, "optimizer.type")).lower()
        params = look_up(filled, "optimizer.params") or {}
        for name, value, meaning in (
            ("betas", [args.adam_beta1, args.adam_beta2], "adam_beta1, adam_beta2"),
            ("eps", args.adam_epsilon, "adam_epsilon"),
        ):
            if is_adam or name in params:  # some others, such as Lamb, have them too
                yield Setting(f"optimizer.params.{name}", value, meaning)
    if "scheduler" in filled:
        yield Setting("scheduler.params.warmup_min_lr", 0.0, "a warm-up from 0", absent=0.0)
        yield Setting("scheduler.params.warmup_max_lr", args.learning_rate, "learning_rate", absent=args.learning_rate)


def _fill(filled: dict[str, Any], setting: Setting) -> Iterator[str]:
    """Fill in one setting, or yield why it cannot be."""
    *above, last = setting.path.split(".")
    section: Any = filled
    for step in above:
        section = section.setdefault(step, {})
    given = section.get(last, AUTO if setting.absent is None else setting.absent)
    if given == AUTO:
        section[last] = setting.value
    elif not _equal(given, setting.value):
        yield f"{setting.path}={given!r}, and {setting.meaning} gives {setting.value!r}"


def _equal(given: Any, value: Any) -> bool:
    if isinstance(value, list):
        return isinstance(given, list | tuple) and len(given) == len(value) and all(map(_equal, given, value))
    if isinstance(value, bool) or isinstance(given, bool):
        return bool(given) == value
    if isinstance(value, int | float) and isinstance(given, int | float):
        return abs(given - value) <= _TOLERANCE * max(1.0, abs(value))
    return given == value


def _of_optimizer(filled: Mapping[str, Any], args: Any) -> Iterator[str]:
    if "optimizer" in filled and str(args.optim) not in _REPLACEABLE:
        kind = look_up(filled, "optimizer.type")
        yield f"optimizer.type={kind!r}, and optim={str(args.optim)!r}: only one can be; leave one of them out"


def _of_schedule(filled: dict[str, Any], args: Any) -> Iterator[str]:
    """Check that the configuration's schedule is the Trainer's."""
    if "scheduler" not in filled:
        return
    params = filled["scheduler"].get("params", {})
    kind, name = filled["scheduler"].get("type"), str(args.lr_scheduler_type)
    if name not in _SCHEDULES.get(kind, ()):
        wanted = f"lr_scheduler_type={_SCHEDULES[kind][0]!r}" if kind in _SCHEDULES else "another lr_scheduler_type"
        yield f"scheduler.type={kind!r}, and lr_scheduler_type={name!r}: leave the section out, or set {wanted}"
    warms_up = bool(args.warmup_steps) or bool(getattr(args, "warmup_ratio", 0))
    if warms_up and params.get("warmup_type", "log") != "linear":
        yield "scheduler.params.warmup_type='log', and the Trainer warms up linearly: set it to 'linear'"
    steps = params.get("warmup_num_steps", AUTO)
    if steps != AUTO and steps != args.warmup_steps:
        yield f"scheduler.params.warmup_num_steps={steps!r}, and warmup_steps gives {args.warmup_steps!r}"
    total = params.get("total_num_steps", AUTO)
    if total != AUTO and total != args.max_steps:
        yield f"scheduler.params.total_num_steps={total!r}, and max_steps gives {args.max_steps!r}"


def _left_open(value: Any, steps: tuple[str, ...]) -> Iterator[str]:
    if value == AUTO:
        yield ".".join(steps)
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _left_open(inner, (*steps, str(name)))


def _hidden_size(config: Any) -> int | None:
    for owner in (config, getattr(config, "text_config", None)):
        for name in ("hidden_size", "hidden_sizes", "d_model"):
            found = getattr(owner, name, None)
            if found:
                return max(found) if isinstance(found, list | tuple) else int(found)
    return None
