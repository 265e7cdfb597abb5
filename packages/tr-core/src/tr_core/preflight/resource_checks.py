"""Check that disk and memory suffice, and estimate how long the run takes."""

from __future__ import annotations

import copy
import shutil
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch

from tr_core.checkpoint.saving import model_parts
from tr_core.preflight.argument_checks import checkpointer_of, steps_with
from tr_core.preflight.context import CheckContext
from tr_core.protocols import EvaluationWeights, Stateful
from tr_core.validation import nearest_existing_path
from tr_log.formatting import size


def check_disk_space(subject: CheckContext) -> None:
    """Compute peak disk usage: the kept checkpoints, the one being written, copies for a Hub."""
    args, figures = subject.args, subject.figures
    folder = nearest_existing_path(Path(args.output_dir).absolute())
    free = figures["disk_free_bytes"] = shutil.disk_usage(folder).free
    if args.save_strategy == "no" or not subject.trains:
        return
    count = figures["checkpoints_at_once"] = checkpoints_at_once(subject)
    if args.save_total_limit is None and (count is None or count > 1):
        many = "however many there will be" if count is None else f"{count} of them"
        subject.say(
            "T203", f"save_total_limit is not set: all checkpoints stay, {many}; set it to keep the newest ones only"
        )
    if subject.given_trainer is None or (count is None and args.save_total_limit is None):
        return
    trainer = subject.trainer
    parts = model_parts(trainer.strategy, trainer.model, trainer.model_wrapped)
    model = tensor_bytes([part.state_dict() for part in parts.values()])
    optimizer = 0 if args.save_only_model else figures.get("optimizer_bytes", 0)
    each = figures["checkpoint_bytes"] = model + optimizer + _other_bytes(subject)
    # The end of a run writes the model once more, and a push copies it, so that training cannot change it.
    hub = 2 * model if args.push_to_hub else 0
    needed = figures["disk_bytes"] = each * (count or 0) + hub
    if needed > free:
        copies = f" and {size(hub)} of copies for the Hub" if hub else ""
        subject.say(
            "T202",
            f"{count} checkpoints of {size(each)} at once{copies} need {size(needed)}, but {folder} has {size(free)} "
            f"free; lower save_total_limit (={args.save_total_limit}), save less often, set save_only_model=True, or "
            "give an output_dir on a larger disk",
            "output_dir",
        )


def checkpoints_at_once(subject: CheckContext) -> int | None:
    """Return the most checkpoints on the disk at once, the one being written included.

    An older one is removed only after the newest is complete, and the best one always stays. None if neither the
    arguments nor the data limit the number.
    """
    args = subject.args
    saves, evaluations = steps_with(subject, "save"), steps_with(subject, "eval")
    if args.load_best_model_at_end:  # a model with the best evaluation so far is saved at once
        saves = None if saves is None or evaluations is None else saves | evaluations
    limit = None if saves is None else len(saves)
    if args.save_total_limit is not None:
        with_best = 1 + bool(args.metric_for_best_model and args.eval_strategy != "no")
        kept = max(args.save_total_limit, with_best) + 1
        limit = kept if limit is None else min(kept, limit)
    existing = _existing_checkpoints(subject)
    return limit if limit is None or not existing else max(limit - existing, 1)


def _existing_checkpoints(subject: CheckContext) -> int:
    if subject.resume in (None, False):
        return 0
    checkpointer = checkpointer_of(subject)
    try:
        return 0 if checkpointer is None else len(checkpointer.steps())
    except ValueError:  # reported by the check of the checkpoint to resume from
        return 0


def _other_bytes(subject: CheckContext) -> int:
    """Return the size of the state that callbacks save beside model and optimizer."""
    trainer = subject.trainer
    held = [part.state_dict() for part in subject.callbacks if isinstance(part, Stateful)]
    for callback in subject.callbacks:
        if isinstance(callback, EvaluationWeights):
            # From a copy: the callback's own weights start with the run.
            held += [part.state_dict() for part in copy.copy(callback).weight_parts(trainer.model).values()]
    return tensor_bytes(held)


def tensor_bytes(tree: Any) -> int:
    """Return the size of all tensors inside mappings, lists and tuples; a repeated tensor counts once."""
    seen: dict[tuple[Any, ...], int] = {}

    def walk(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            where = id(value) if value.device.type == "meta" else value.data_ptr()
            seen[(value.device, where, value.shape)] = value.numel() * value.element_size()
        elif isinstance(value, dict):
            for item in value.values():
                walk(item)
        elif isinstance(value, list | tuple):
            for item in value:
                walk(item)

    walk(tree)
    return sum(seen.values())


def check_optimizer(subject: CheckContext) -> None:
    """Build the run's optimizer; its changes to the model, such as hooks, stay."""
    trainer, figures, name = subject.trainer, subject.figures, f"optim={str(subject.args.optim)!r}"
    trainable = [parameter for parameter in trainer.model.parameters() if parameter.requires_grad]
    if not subject.trains or not trainable:
        return
    figures["parameter_bytes"] = tensor_bytes(list(trainer.model.parameters()))
    figures["gradient_bytes"] = tensor_bytes(trainable)
    with subject.saying("T304", "optim", what=f"{name}: "):
        subject.optimizer = trainer.create_optimizer()
    if subject.optimizer is None:
        return
    estimate: Any = getattr(subject.optimizer, "expected_bytes", None)
    if estimate is None:
        held = state_bytes(subject.optimizer)
    else:  # an optimizer that frees gradients during the backward pass, or whose step needs one
        figures["gradient_bytes"], held = estimate(micro_batches=subject.args.gradient_accumulation_steps)
    figures["optimizer_is_assumed"] = held is None
    figures["optimizer_bytes"] = 8 * sum(p.numel() for p in trainable) if held is None else held


def state_bytes(optimizer: torch.optim.Optimizer) -> int | None:
    """Return the size of an optimizer's state, now or after its first step; None if unknown.

    A copy of it makes a step over each parameter, with a shape but no values. An optimizer that reads values fails in
    that step. It has created its state by then.
    """
    if optimizer.state:
        return tensor_bytes(dict(optimizer.state))
    total = 0
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            twin: Any = object.__new__(type(optimizer))
            shape = torch.nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
            shape.grad = torch.empty_like(shape)
            # Fused kernels need values; the state is the same without them.
            plain = {name: value for name, value in (("fused", None), ("foreach", False)) if name in group}
            state: dict[Any, Any] = defaultdict(dict)
            vars(twin).update(vars(optimizer), param_groups=[{**group, **plain, "params": [shape]}], state=state)
            try:
                type(optimizer).step(twin)
            except Exception:  # any error from reading a value, or from other references to its parameters
                if not state:
                    return None
            total += tensor_bytes(dict(state))
    return total


def check_memory(subject: CheckContext) -> None:
    """Compare the size of parameters, gradients and optimizer state with an accelerator's memory."""
    figures, device = subject.figures, subject.trainer.strategy.device
    module: Any = None if device.type == "cpu" else torch.get_device_module(device)
    if "optimizer_bytes" not in figures or not hasattr(module, "mem_get_info"):
        return
    needed = sum(figures[f"{part}_bytes"] for part in ("parameter", "gradient", "optimizer"))
    if needed > (there := module.mem_get_info(device)[1]):
        subject.say(
            "T306",
            f"parameters, gradients and optimizer state take {size(needed)}, the device has {size(there)}; "
            "freeze more of the model, choose an optimizer with a smaller state, or divide it over devices",
        )


def estimate_time(subject: CheckContext) -> None:
    """Estimate the time from one forward and backward; an upper bound if larger batches are more efficient."""
    figures = subject.figures
    if "forward_backward_s" in figures and figures.get("steps") and figures.get("trial_samples"):
        per_sample_s = figures["forward_backward_s"] / figures["trial_samples"]
        per_rank = figures["samples_per_step"] / figures["world_size"]
        figures["estimated_s"] = per_sample_s * per_rank * figures["steps"]
