"""Check that disk and memory suffice."""

from __future__ import annotations

import copy
import math
import shutil
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch

from tr_core.checkpoint.saving import model_parts
from tr_core.evaluation.gather import map_tensors
from tr_core.preflight.context import CheckContext
from tr_core.preflight.report import IN_MEMORY
from tr_core.protocols import EvaluationWeights
from tr_core.state import resolve_steps
from tr_core.validation import nearest_existing_path
from tr_log.formatting import size


def check_disk_space(subject: CheckContext) -> None:
    """Compute peak disk usage: the kept checkpoints, the one being written, copies for a Hub."""
    args, figures = subject.args, subject.figures
    folder = nearest_existing_path(Path(args.output_dir).absolute())
    free = figures["disk_free_bytes"] = shutil.disk_usage(folder).free
    if args.save_strategy == "no" or not subject.trains:
        return
    count = checkpoints_at_once(subject)
    figures["checkpoints_at_once"] = count = None if count == math.inf else int(count)
    if subject.given_trainer is None or count is None:
        return
    trainer = subject.trainer
    parts = model_parts(trainer.strategy, trainer.model, trainer.model_wrapped)
    model = tensor_bytes([part.state_dict() for part in parts.values()])
    optimizer = 0 if args.save_only_model else figures.get("optimizer_bytes", 0)
    # Of copies: a callback's own weights start with the run.
    held = [copy.copy(each) for each in subject.callbacks if isinstance(each, EvaluationWeights)]
    averages = tensor_bytes([p.state_dict() for each in held for p in each.weight_parts(trainer.model).values()])
    each = figures["checkpoint_bytes"] = model + optimizer + averages
    # The end of a run writes the model once more, and a push copies it, so that training cannot change it.
    hub = 2 * model if args.push_to_hub else 0
    needed = figures["disk_bytes"] = each * count + hub
    if needed > free:
        copies = f" and {size(hub)} of copies for the Hub" if hub else ""
        subject.say(
            "T202",
            f"{count} checkpoints of {size(each)} at once{copies} need {size(needed)}, but {folder} has {size(free)} "
            f"free; lower save_total_limit (={args.save_total_limit}), save less often, set save_only_model=True, or "
            "give an output_dir on a larger disk",
            "output_dir",
        )


def times(subject: CheckContext, event: str) -> float:
    """Return how often the run evaluates (`eval`) or saves (`save`) at most; infinite where nothing tells."""
    args, steps, epochs = subject.args, subject.steps, subject.epochs
    strategy = str(getattr(args, f"{event}_strategy"))
    if strategy == "best":
        return times(subject, "eval")
    if strategy == "steps" and steps is not None:
        return math.ceil(steps / resolve_steps(getattr(args, f"{event}_steps"), steps))
    if strategy == "epoch" and epochs is not None:
        return epochs
    return 0 if strategy == "no" else math.inf


def checkpoints_at_once(subject: CheckContext) -> float:
    """Return the most checkpoints on the disk at once beside those of before, the one being written included.

    An older one is removed only after the newest is complete, and the best one always stays. Infinite if neither the
    arguments nor the data limit the number.
    """
    args, most = subject.args, times(subject, "save")
    if args.load_best_model_at_end:  # a model with the best evaluation so far is saved at once
        most = max(most, times(subject, "eval"))
    if args.save_total_limit is not None:
        with_best = 1 + bool(args.metric_for_best_model and args.eval_strategy != "no")
        most = min(most, max(args.save_total_limit, with_best) + 1)
    before = len(subject.checkpointer.steps()) if subject.resumes and subject.checkpointer is not None else 0
    return max(most - before, 1) if before else most


def tensor_bytes(tree: Any, *, here: bool = False) -> int:
    """Return the size of all tensors inside mappings, lists and tuples; a repeated tensor counts once.

    Of a tensor that is divided over ranks it is the size of the whole, or with `here` that of this rank's share.
    """
    seen: dict[tuple[Any, ...], int] = {}

    def count(tensor: torch.Tensor) -> None:
        divided: Any = tensor  # one that is divided has no address itself
        part = divided.to_local() if hasattr(tensor, "to_local") else tensor
        where = id(tensor) if tensor.device.type == "meta" or not part.numel() else part.data_ptr()
        seen[(tensor.device, where, tensor.shape)] = (part if here else tensor).nbytes

    map_tensors(count, tree)
    return sum(seen.values())


def check_optimizer(subject: CheckContext) -> None:
    """Build the run's optimizer and schedule; their changes to the model, such as hooks, stay."""
    trainer, figures = subject.trainer, subject.figures
    trainable = [parameter for parameter in trainer.model.parameters() if parameter.requires_grad]
    if not subject.trains or not trainable:
        return
    parameters = list(trainer.model.parameters())
    figures["parameter_bytes"], figures["gradient_bytes"] = tensor_bytes(parameters), tensor_bytes(trainable)
    with subject.saying("T304", "optim", "lr_scheduler_type", what=f"optim={str(subject.args.optim)!r}: "):
        trainer.renew_optimizer(subject.steps or 1)
    if (optimizer := trainer.optimizer) is None:
        return
    estimate: Any = getattr(optimizer, "expected_bytes", None)
    if estimate is None:
        held = state_bytes(optimizer)
        if figures["parameter_bytes"] > (share := tensor_bytes(parameters, here=True)):
            figures["parameter_bytes_of_a_device"] = share
            figures["gradient_bytes_of_a_device"] = tensor_bytes(trainable, here=True)
            figures["optimizer_bytes_of_a_device"] = state_bytes(optimizer, here=True)
    else:  # an optimizer that frees gradients during the backward pass, or whose step needs one
        figures["gradient_bytes"], held = estimate(micro_batches=subject.args.gradient_accumulation_steps)
    figures["optimizer_is_assumed"] = held is None  # two float32 numbers a trainable parameter
    figures["optimizer_bytes"] = 8 * sum(p.numel() for p in trainable) if held is None else held
    if subject.args.on_spike is not None:  # holds weights and state once more
        for of in ("", "_of_a_device"):
            if f"parameter_bytes{of}" in figures:
                figures[f"snapshot_bytes{of}"] = figures[f"parameter_bytes{of}"] + (
                    figures[f"optimizer_bytes{of}"] or 0
                )
    check_memory(subject)


def check_memory(subject: CheckContext) -> None:
    """Compare the size of parameters, gradients and optimizer state, or a device's share, with its memory."""
    figures, device = subject.figures, subject.trainer.strategy.device
    module: Any = None if device.type == "cpu" else torch.get_device_module(device)
    needed = sum(figures.get(f"{part}_bytes_of_a_device") or figures.get(f"{part}_bytes", 0) for part in IN_MEMORY)
    parts = "parameters, gradients, optimizer state" + ", and a snapshot of them," * ("snapshot_bytes" in figures)
    if hasattr(module, "mem_get_info") and needed > (there := module.mem_get_info(device)[1]):
        subject.say(
            "T306",
            f"{parts} take {size(needed)}, the device has {size(there)}; "
            "freeze more of the model, choose an optimizer with a smaller state, or divide it over devices",
        )


def state_bytes(optimizer: torch.optim.Optimizer, *, here: bool = False) -> int | None:
    """Return the size of an optimizer's state after its first step; None if unknown. `here`: this rank's share.

    A copy of it makes a step over each parameter, with a shape but no values. An optimizer that reads values fails in
    that step. It has created its state by then.
    """
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
            total += tensor_bytes(dict(state), here=here)
    return total
