"""The page of all training arguments, from their fields: type, default, what each changes and excludes."""

from __future__ import annotations

import itertools
import types
import typing
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, Literal, get_args, get_origin

from tr_args import Seq2SeqTrainingArguments
from tr_args.aliases import aliases
from tr_args.constraints import Above, AtLeast, Between, Later, Numbers, Only, StepsOrRatio
from tr_args.help_page import field_help
from tr_args.rules import conflicts, without_effect
from tr_args.schema import FieldSpec, schema
from tr_args.types.sharding import AcceleratorConfig

PAGE = Path(__file__).resolve().parent.parent / "packages/tr-args/docs/arguments.md"
HEAD = """\
# All training arguments

`TrainingArguments` has all of these but those under "Generation", which `Seq2SeqTrainingArguments` adds. Each is a
keyword in code, `--name value` on a command line, and a key in a file ([tr-args](../README.md)). This page is written
from their fields by `nox -s regen`.

"Resumed with another value" says what the change means to a run that is resumed
([how](../../tr-core/docs/adr/0005-changed-settings-at-resume.md)). "Changed later" says when an assignment to the
arguments of a Trainer acts ([more](../../tr-core/docs/changing-a-run.md)); without that line, a run takes the
argument when it begins, and changing it in the middle is an error.
"""
RESUMED = {
    Numbers.UNCHANGED: "the numbers of the run stay the same",
    Numbers.OPTIMIZER: "the options of the optimizer's groups change",
    Numbers.SCHEDULE: "the learning-rate schedule changes",
    Numbers.ORDER: "the order of the data changes: only between epochs",
    Numbers.METRIC: "the best model is chosen by another metric",
    Numbers.OTHER: "the numbers of the run change",
}
_EACH_BATCH: dict[str, Any] = {"gradient_accumulation_kwargs": {"sync_each_batch": True}}
# Values to try of the arguments that contradict others, beside their choices, the other truth value and small numbers.
TRIED = {
    "eval_strategy": ["steps"], "logging_steps": [0], "eval_steps": [0], "save_steps": [0],
    "save_strategy": ["no", "best", "steps"], "logging_strategy": ["steps"],
    "lr_scheduler_type": ["reduce_lr_on_plateau"],
    "strategy": ["single", "ddp", "fsdp", "deepspeed"], "fsdp": ["full_shard"], "deepspeed": ["ds.json"],
    "fsdp_config": [{"min_num_params": 1}, {"min_num_params": 1, "transformer_layer_cls_to_wrap": ["Block"]}],
    "parallelism_config": [{"dp_shard_size": 2}, {"tp_size": 2}], "tp_plan": [{"up": "colwise"}],
    "ep_plan": [{"experts": "experts"}], "pp_split": [["layers.1"]], "pp_schedule": ["gpipe"],
    "on_spike": ["rewind"], "on_nonfinite": ["skip"],
    "elastic": ["bitwise"], "virtual_shards": [3],
    "average_tokens_across_devices": [False], "ddp_bucket_cap_mb": [25],
    "step_compile": ["graph"], "overfit_batches": [2],
    "neftune_length": ["padded"], "ema_start_step": [1],
    "ema_update_steps": [2], "dataloader_prefetch_factor": [2], "dataloader_multiprocessing_context": ["spawn"],
    "label_smoothing_factor": [0.1],
    "accelerator_config": [AcceleratorConfig(split_batches=True), AcceleratorConfig(**_EACH_BATCH)],
}  # fmt: skip
SWITCHES = (
    "bf16", "fp16", "bf16_full_eval", "fp16_full_eval", "eval_perplexity", "load_best_model_at_end",
    "dataloader_persistent_workers", "auto_find_batch_size", "ddp_find_unused_parameters", "torch_compile",
    "ddp_static_graph",
)  # fmt: skip


def page() -> str:
    """Return the page."""
    parts, topic, excluded = [HEAD], "", exclusions()
    former: dict[str, list[str]] = {}
    for old, alias in aliases(Seq2SeqTrainingArguments).items():
        former.setdefault(alias.target, []).append(old)
    for name, spec in schema(Seq2SeqTrainingArguments).items():
        if (title := spec.owner.__dict__.get("_title", "Generation")) != topic:
            topic = title
            parts.append(f"## {title}\n")
        parts.append(entry(spec, excluded.get(name, []), former.get(name, [])))
    return "\n".join(parts)


def entry(spec: FieldSpec, excluded: list[str], former: list[str]) -> str:
    """Return the section of one argument."""
    default = "required" if spec.required else f"default `{shown(spec.make_default())}`"
    lines = [f"### {spec.name}", "", f"{type_text(spec.hint)}, {default}. {field_help(spec)}", ""]
    takes = [text for constraint in spec.constraints if (text := limits(constraint))]
    lines += [f"- Takes {text}." for text in takes]
    lines += [f"- Only `{shown(fact.value)}`: {fact.reason}." for fact in spec.facts if isinstance(fact, Only)]
    lines += [f"- Resumed with another value: {RESUMED[fact]}." for fact in spec.facts if isinstance(fact, Numbers)]
    lines += [f"- Changed later: {fact.value}." for fact in spec.facts if isinstance(fact, Later)]
    lines += [f"- {text}." for text in excluded]
    lines += [f"- Former names: {', '.join(f'`{name}`' for name in sorted(former))}."] if former else []
    return "\n".join(lines).rstrip() + "\n"


def exclusions() -> dict[str, list[str]]:
    """Return what each argument excludes or needs, found by asking the rules about all pairs of values."""
    specs = schema(Seq2SeqTrainingArguments)
    plain = {name: None if spec.required else spec.make_default() for name, spec in specs.items()}
    values = {**TRIED, **{name: [True] for name in SWITCHES}}
    single = [(name, value) for name, several in values.items() for value in several]
    found: dict[str, list[str]] = {}
    for base in ({}, {"eval_strategy": "steps"}):
        for (one, value), (other, another) in itertools.product(single, single):
            args: Any = SimpleNamespace(**{**plain, **base, one: value, other: another})
            for names, text in (*conflicts(args), *without_effect(args)):
                for name in names:
                    others = " and ".join(f"`{each}`" for each in names if each != name)
                    line = f"With {others}: {text}" if others else text[0].upper() + text[1:]
                    if line not in found.setdefault(name, []):
                        found[name].append(line)
    return found


def type_text(hint: Any) -> str:
    """Return a type in words: `int`, `float or none`, one of some words."""
    while get_origin(hint) is Annotated:
        hint = get_args(hint)[0]
    if get_origin(hint) in (types.UnionType, typing.Union):
        return " or ".join(type_text(part) for part in get_args(hint))
    if get_origin(hint) is Literal:
        return " or ".join(f"`{value}`" for value in get_args(hint))
    if isinstance(hint, type) and issubclass(hint, Enum):
        return " or ".join(f"`{member.value}`" for member in hint)
    if get_args(hint):
        return f"{hint.__origin__.__name__} of {' to '.join(type_text(part) for part in get_args(hint))}"
    if hint is Any:
        return "anything"
    return "none" if hint is type(None) else getattr(hint, "__name__", str(hint))


def limits(constraint: Any) -> str:
    """Return the values that a constraint allows; empty if the type says all."""
    match constraint:
        case AtLeast(low=low):
            return f"numbers from {low}"
        case Above(low=low):
            return f"numbers above {low}"
        case Between(low=low, high=high):
            start = "above" if constraint.open_start else "from"
            return f"numbers {start} {low} {'to below' if constraint.open_end else 'to'} {high}"
        case StepsOrRatio():
            return "a whole number of steps, or a share of all steps below 1"
    return ""


def shown(value: Any) -> str:
    """Return a default as it is written in a file."""
    if isinstance(value, Enum):
        value = value.value
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if hasattr(value, "__dataclass_fields__"):
        return f"{type(value).__name__}()"
    return str(value) if not isinstance(value, str) or value else '""'


def named() -> Iterator[str]:
    """Yield the names of all arguments, for the test that the page has each."""
    yield from schema(Seq2SeqTrainingArguments)
