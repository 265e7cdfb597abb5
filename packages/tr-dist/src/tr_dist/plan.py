"""Propose how many processes divide what of a model, so that it fits: `trainer plan`."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # help and a mistyped word come at once
    from tr_dist.mesh.estimate import Plan, Subject, Work

_GIB = 2**30
_USED = 0.9  # of a device's memory; the rest is for what the estimate leaves out
_MOST_DEVICES = 65_536
_OPTIMIZERS = ("adamw_torch", "adamw_torch_fused", "adagrad", "sgd")
_SIZES = ("per_device_train_batch_size", "gradient_accumulation_steps")
_HANDED_ON = (*_SIZES, "optim", "bf16", "gradient_checkpointing")  # as they are given, if they are not the default
_DESCRIPTION = """\
Estimate what a model takes on each device, and print the plan with the fewest exchanges that fits, with its command.

MODEL is a folder or config.json of transformers, or module:function of your own code, which returns the model (and
is called where tensors have shapes and no numbers). Nothing is downloaded and no weights are read.
"""
_EPILOG = """\
examples:
  trainer plan ./Llama-3.1-8B --devices 8 --memory 80 --bf16 --length 8192
  trainer plan models:build --devices 16 --per_machine 8 --memory 24 --tp_plan '{"layers.*.up": "colwise"}'

Plans are tried in this order: replicas, shards (from the fewest), sequences divided by sp or matrices by tp within a
machine, experts by ep, stages of layers by pp. A plan fits if the estimate is at most 0.9 of the memory.
What is counted, and what is left out, is in the docstring of tr_dist.mesh.estimate.Subject.estimate.

exit codes: 0 a plan fits; 1 none does; 2 this command line is wrong.
"""


def main(argv: Sequence[str]) -> int:
    """Print the candidates and the command of the first that fits.

    Args:
        argv: the command line after the command's name.

    Returns:
        0, or 1 if nothing fits; 2 ends the program where the command line is wrong.
    """
    parser = _parser()
    given = parser.parse_args(argv)
    if given.devices > given.per_machine and given.devices % given.per_machine:
        parser.error(f"--devices {given.devices} is no multiple of --per_machine {given.per_machine}")
    from tr_dist.mesh.estimate import Subject, Work

    try:
        plan_of_tp = json.loads(given.tp_plan) if given.tp_plan else None
        subject = Subject(_model(given.model, given.dtype), plan_of_tp)
    except (ValueError, ImportError, OSError, AttributeError, TypeError) as error:
        parser.error(f"{given.model}: {error}")
    work = Work(
        batch=given.per_device_train_batch_size,
        length=given.length,
        accumulation=given.gradient_accumulation_steps,
        bf16=given.bf16,
        recomputes=given.gradient_checkpointing,
        optim=given.optim,
    )
    chosen = _show(subject, work, given)
    if chosen is not None:
        print(f"\n{command(subject, chosen, given)}")
        return 0
    print(f"\nnothing fits {given.devices} devices of {given.memory:g} GiB; {_what_would(subject, work, given)}")
    return 1


def command(subject: Subject, plan: Plan, given: argparse.Namespace) -> str:
    """Return the line to type for a plan."""
    machines, words = max(1, given.devices // given.per_machine), ["trainer", "launch"]
    words += ["--nproc", str(min(given.devices, given.per_machine))]
    if machines > 1:
        words += f"--nnodes {machines} --node_rank NUMBER --master_addr FIRST --master_port 29500".split()
    words.append("train.py")
    if plan.divides:
        sizes = ",".join(f"{name}={size}" for name, size in plan.sizes.items())
        words += ["--parallelism_config", sizes, "--fsdp", f"full_shard{' auto_wrap' * subject.knows_layers}"]
        if not subject.knows_layers:
            words += ["--fsdp_config", json.dumps({"min_num_params": subject.smallest_unit})]
        words += ["--tp_plan", given.tp_plan] if plan.tp > 1 and given.tp_plan else []
    defaults = _parser()
    for name in _HANDED_ON:
        if (value := getattr(given, name)) != defaults.get_default(name):
            words += [f"--{name}", str(value).lower()]
    return shlex.join(words)


def candidates(devices: int, per_machine: int, *, long: bool, experts: bool) -> list[Plan]:
    """Return all plans for so many devices, from the one with the fewest exchanges.

    Args:
        devices: number of processes.
        per_machine: of them on a machine, within which `sp` and `tp` stay.
        long: whether the sequence is what does not fit, so that it is divided before matrices are.
        experts: whether the model has experts.
    """
    from tr_dist.mesh.estimate import Plan

    def sizes(most: int) -> list[int]:
        return [n for n in range(1, most + 1) if most % n == 0]

    near = min(devices, per_machine)
    found = [
        Plan(devices // together // shards, shards, tp, sp, ep, pp)
        for pp in sizes(devices)
        for tp in sizes(near)
        for sp in (sizes(near // tp) if pp == 1 else [1])
        if devices % (together := pp * tp * sp) == 0
        for shards in range(1, devices // together + 1)
        if devices // together % shards == 0
        for ep in (sizes(shards) if experts else [1])
    ]

    def exchanges(plan: Plan) -> tuple[int, ...]:
        pair = (plan.tp, plan.sp) if long else (plan.sp, plan.tp)
        return (plan.pp, *pair, plan.ep, plan.shards)

    return sorted(found, key=exchanges)


def _tried(subject: Subject, work: Work, devices: int, given: Any) -> Iterator[tuple[Plan, str, dict[str, float]]]:
    """Yield each candidate with why it is not possible, or the estimate of its bytes."""
    from tr_dist.mesh.estimate import Plan

    whole = subject.estimate(Plan(shards=devices), work)
    long = whole["activations"] + whole["logits"] > sum(whole.values()) / 2
    on_machine = min(devices, given.per_machine)
    plans = candidates(devices, on_machine, long=long, experts=subject.num_experts > 0)
    for plan in plans:
        refused = subject.refusal(plan, work.length)
        yield plan, refused, {} if refused else subject.estimate(plan, work)


def _show(subject: Subject, work: Work, given: argparse.Namespace) -> Plan | None:
    """Print a line for each candidate up to the first that fits, and return that one."""
    from tr_dist.mesh.estimate import PARTS

    limit = given.memory * _USED
    print(f"{type(subject.model).__name__}: {subject.num_parameters:,} parameters of {subject.types}")
    if not subject.counts_activations:
        print("activations and logits are not counted: the model has no config with hidden_size")
    print(f"GiB a device, of {given.memory:g}; at most {limit:.4g} are to be used")
    print(f"{'plan':<26}{'all':>8}  " + " ".join(f"{part:>11}" for part in PARTS))
    refused: set[str] = set()
    for plan, why, found in _tried(subject, work, given.devices, given):
        name = " ".join(f"{name}={size}" for name, size in plan.sizes.items()) or "one device"
        if why:
            if why not in refused:
                print(f"{name:<26}  not possible: {why}")
            refused.add(why)
            continue
        needed = sum(found.values()) / _GIB
        parts = " ".join(f"{number / _GIB:>11.2f}" for number in found.values())
        print(f"{name:<26}{needed:>8.2f}  {parts}  {'fits' if needed <= limit else 'no'}")
        if needed <= limit:
            return plan
    return None


def _least(subject: Subject, work: Work, devices: int, given: Any) -> float:
    """Return the GiB of memory that the smallest estimate for so many devices needs."""
    found = [sum(found.values()) for _, why, found in _tried(subject, work, devices, given) if not why]
    return min(found) / _GIB / _USED


def _what_would(subject: Subject, work: Work, given: argparse.Namespace) -> str:
    """Return the smallest memory and number of devices that do, and whether recomputing would."""
    least = _least(subject, work, given.devices, given)
    texts = [f"{given.devices} devices need {least:.4g} GiB each"]
    devices = given.devices * 2
    while devices <= _MOST_DEVICES and _least(subject, work, devices, given) > given.memory:
        devices *= 2
    texts.append(
        f"of {given.memory:g} GiB it takes {devices} devices"
        if devices <= _MOST_DEVICES
        else f"of {given.memory:g} GiB no number of devices does: lower --per_device_train_batch_size or --length"
    )
    recomputing = replace(work, recomputes=True)
    if not work.recomputes and _least(subject, recomputing, given.devices, given) <= given.memory:
        texts.append("with --gradient_checkpointing these devices do")
    return "; ".join(texts)


def _model(name: str, dtype: str | None) -> Any:
    """Return the model of a folder, a config.json or a `module:function`, without values."""
    import torch

    with torch.device("meta"):
        model = _of_transformers(name) if os.path.exists(name) else _of_function(name)
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"it gave a {type(model).__name__}, and a plan is for a torch.nn.Module")
    return model if dtype is None else model.to(getattr(torch, dtype))


def _of_transformers(path: str) -> Any:
    try:
        import transformers
    except ImportError:
        raise ImportError("a folder or config.json is read by transformers: pip install transformers") from None
    config = transformers.AutoConfig.from_pretrained(path, local_files_only=True)
    own = [found for name in config.architectures or () if (found := getattr(transformers, name, None)) is not None]
    return own[0]._from_config(config) if own else transformers.AutoModelForCausalLM.from_config(config)


def _of_function(name: str) -> Any:
    module, colon, function = name.partition(":")
    if not (colon and module and function):
        raise ValueError("there is no such folder or file; your own code is given as module:function")
    sys.path.insert(0, os.getcwd())
    return getattr(importlib.import_module(module), function)()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="trainer plan",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("model", metavar="MODEL", help="a folder, a config.json, or module:function")
    parser.add_argument("--devices", type=_whole, required=True, help="number of devices in all")
    parser.add_argument("--memory", type=float, required=True, metavar="GIB", help="memory of each, in GiB")
    parser.add_argument("--per_machine", type=_whole, default=8, help="devices of a machine (8)")
    parser.add_argument("--length", type=_whole, default=2048, help="positions of a sample (2048)")
    parser.add_argument("--per_device_train_batch_size", type=_whole, default=8, help="samples of a replica (8)")
    parser.add_argument("--gradient_accumulation_steps", type=_whole, default=1, help="micro-batches of a step (1)")
    parser.add_argument("--optim", choices=_OPTIMIZERS, default="adamw_torch", help="optimizer (adamw_torch)")
    parser.add_argument("--bf16", action="store_true", help="compute in bfloat16")
    parser.add_argument("--gradient_checkpointing", action="store_true", help="recompute layers in the backward pass")
    parser.add_argument("--tp_plan", metavar="JSON", help="which modules tp divides, and how; unset: the model's plan")
    types = ("float32", "bfloat16", "float16")
    parser.add_argument("--dtype", choices=types, help="type of the weights; unset: that of the configuration")
    return parser


def _whole(text: str) -> int:
    if not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 1")
    return int(text)
