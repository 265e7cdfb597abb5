"""Check that disk and memory suffice, and estimate how long the run takes."""

from __future__ import annotations

import copy
import math
import shutil
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from tr_args import TrainingArguments
from tr_core.checkpoint.saving import model_parts
from tr_core.plugins import PluginError
from tr_core.preflight.argument_checks import checkpointer_of, evaluation_count
from tr_core.preflight.context import CheckContext
from tr_core.preflight.origins import last_line, raised_at
from tr_core.preflight.report import Problem
from tr_core.protocols import EvaluationWeights, Stateful
from tr_core.state import resolve_steps
from tr_core.trainer_methods import TrainerMethods
from tr_core.validation import nearest_existing_path
from tr_log.formatting import size


def check_disk_space(subject: CheckContext) -> Iterator[Problem]:
    """Compute peak disk usage: the kept checkpoints, the one being written, copies for a Hub."""
    args, figures = subject.args, subject.figures
    folder = nearest_existing_path(Path(args.output_dir).absolute())
    free = figures["disk_free_bytes"] = shutil.disk_usage(folder).free
    if args.save_strategy == "no" or not subject.trains:
        return
    count = figures["checkpoints_at_once"] = checkpoints_at_once(subject)
    if args.save_total_limit is None and (count is None or count > 1):
        many = "however many there will be" if count is None else f"{count} of them"
        yield Problem(
            "T203", f"save_total_limit is not set: all checkpoints stay, {many}; set it to keep the newest ones only"
        )
    if subject.given_trainer is None or (count is None and args.save_total_limit is None):
        return
    model = figures["model_bytes"] = _model_bytes(subject.trainer)
    optimizer = 0 if args.save_only_model else figures.get("optimizer_bytes", 0)
    each = figures["checkpoint_bytes"] = model + optimizer + _other_bytes(subject)
    # The end of a run writes the model once more, and a push copies it, so that training cannot change it.
    hub = 2 * model if args.push_to_hub else 0
    needed = figures["disk_bytes"] = each * (count or 0) + hub
    if needed > free:
        copies = f" and {size(hub)} of copies for the Hub" if hub else ""
        yield Problem(
            "T202",
            f"{count} checkpoints of {size(each)} at once{copies} need {size(needed)}, but {folder} has {size(free)} "
            f"free; lower save_total_limit (={args.save_total_limit}), save less often, set save_only_model=True, or "
            "give an output_dir on a larger disk",
            subject.origin("output_dir"),
        )


def checkpoints_at_once(subject: CheckContext) -> int | None:
    """Return the most checkpoints on the disk at once, the one being written included.

    An older one is removed only after the newest is complete, and the best one always stays. None if neither the
    arguments nor the data limit the number.
    """
    args = subject.args
    written = _checkpoints_written(subject)
    if args.save_total_limit is None:
        limit = written
    else:
        with_best = 1 + bool(args.metric_for_best_model and args.eval_strategy != "no")
        kept = max(args.save_total_limit, with_best) + 1
        limit = kept if written is None else min(kept, written)
    existing = _existing_checkpoints(subject)
    return limit if limit is None or not existing else max(limit - existing, 1)


def _checkpoints_written(subject: CheckContext) -> int | None:
    """Count the checkpoints that the run writes; None if unknown."""
    args, steps = subject.args, subject.steps
    if steps is None:
        return None
    evaluations = evaluation_count(subject, steps)
    if args.save_strategy == "best":
        return evaluations
    planned = {"steps": math.ceil(steps / resolve_steps(args.save_steps, steps)), "epoch": subject.epochs}
    written = planned.get(str(args.save_strategy))
    if not args.load_best_model_at_end or written is None or _save_meets_evaluation(args):
        return written
    # A model with the best evaluation so far is saved at once.
    return None if evaluations is None else min(written + evaluations, steps)


def _save_meets_evaluation(args: TrainingArguments) -> bool:
    """Whether every evaluation coincides with a checkpoint anyway."""
    strategies = {str(args.save_strategy), str(args.eval_strategy)}
    if strategies == {"steps"}:
        between_evaluations, between_saves = args.eval_steps or 0, args.save_steps
        return between_evaluations == between_saves or (
            between_evaluations >= 1 <= between_saves and between_evaluations % between_saves == 0
        )
    return strategies == {"epoch"}


def _existing_checkpoints(subject: CheckContext) -> int:
    if subject.resume in (None, False):
        return 0
    checkpointer = checkpointer_of(subject)
    try:
        return 0 if checkpointer is None else len(checkpointer.steps())
    except ValueError:  # reported by the check of the checkpoint to resume from
        return 0


def _model_bytes(trainer: TrainerMethods) -> int:
    parts = model_parts(trainer.strategy, trainer.model, trainer.model_wrapped)
    return tensor_bytes([part.state_dict() for part in parts.values()])


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


def check_optimizer(subject: CheckContext) -> Iterator[Problem]:
    """Build the run's optimizer; its changes to the model, such as hooks, stay."""
    trainer, figures = subject.trainer, subject.figures
    trainable = [parameter for parameter in trainer.model.parameters() if parameter.requires_grad]
    if not subject.trains or not trainable:
        return
    figures["parameter_bytes"] = tensor_bytes(list(trainer.model.parameters()))
    figures["gradient_bytes"] = tensor_bytes(trainable)
    try:
        subject.optimizer = trainer.create_optimizer()
    except PluginError as error:
        yield Problem("T301", str(error), subject.origin("optim"))
    except ImportError as error:
        yield Problem("T302", f"optim={subject.args.optim!r}: {error}", subject.origin("optim"))
    except Exception as error:
        yield Problem("T304", f"optim={subject.args.optim!r}: {last_line(error)}", raised_at(error))
    if subject.optimizer is None:
        return
    estimate: Any = getattr(subject.optimizer, "expected_bytes", None)
    if estimate is None:
        size = state_bytes(subject.optimizer)
    else:  # an optimizer that frees gradients during the backward pass, or whose step needs one
        figures["gradient_bytes"], size = estimate(micro_batches=subject.args.gradient_accumulation_steps)
    figures["optimizer_is_assumed"] = size is None
    figures["optimizer_bytes"] = 8 * sum(p.numel() for p in trainable) if size is None else size


def state_bytes(optimizer: torch.optim.Optimizer) -> int | None:
    """Return the size of an optimizer's state, now or after its first step; None if unknown.

    A copy of it makes a step over parameters with shapes but no values. An optimizer that reads values fails in that
    step. It has created its state by then, so each parameter is measured separately.
    """
    if optimizer.state:
        return tensor_bytes(dict(optimizer.state))
    state, failed = _state_of_twin(optimizer, optimizer.param_groups)
    if not failed:
        return tensor_bytes(state)
    total = 0
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state, failed = _state_of_twin(optimizer, [{**group, "params": [parameter]}])
            if failed and not state:
                return None
            total += tensor_bytes(state)
    return total


def _state_of_twin(optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> tuple[dict[Any, Any], bool]:
    """Return the state after a step of a copy of `optimizer` over `groups`, and whether the step failed."""
    twin: Any = object.__new__(type(optimizer))
    vars(twin).update(vars(optimizer))
    # Fused kernels need values; the state is the same without them.
    plain = {"fused": None, "foreach": False}
    twin.param_groups = [
        {**group, **{k: v for k, v in plain.items() if k in group}, "params": [_shape_of(p) for p in group["params"]]}
        for group in groups
    ]
    twin.state = defaultdict(dict)
    try:
        type(optimizer).step(twin)
    except Exception:  # any error from reading a value, or from other references to its parameters
        return dict(twin.state), True
    return dict(twin.state), False


def _shape_of(parameter: torch.Tensor) -> torch.nn.Parameter:
    shape = torch.nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad)
    shape.grad = torch.empty_like(shape)
    return shape


def check_memory(subject: CheckContext) -> Iterator[Problem]:
    """Compare the size of parameters, gradients and optimizer state with an accelerator's memory."""
    figures = subject.figures
    device = subject.trainer.strategy.device
    if device.type == "cpu" or "optimizer_bytes" not in figures:
        return
    module = torch.get_device_module(device)
    if hasattr(module, "mem_get_info"):
        yield from memory_problems(figures, module.mem_get_info(device)[1])


def memory_problems(figures: dict[str, int], total_bytes: int) -> Iterator[Problem]:
    """Find a model that does not fit at any batch size."""
    needed = figures["parameter_bytes"] + figures["gradient_bytes"] + figures["optimizer_bytes"]
    if needed > total_bytes:
        yield Problem(
            "T306",
            f"parameters, gradients and optimizer state take {size(needed)}, the device has {size(total_bytes)}; "
            "freeze more of the model, choose an optimizer with a smaller state, or divide it over devices",
        )


def estimate(subject: CheckContext) -> Iterator[Problem]:
    """Estimate the time from one forward and backward; an upper bound if larger batches are more efficient."""
    figures = subject.figures
    if "forward_backward_s" in figures and figures.get("steps") and figures.get("trial_samples"):
        per_sample_s = figures["forward_backward_s"] / figures["trial_samples"]
        per_rank = figures["samples_per_step"] / figures["world_size"]
        figures["estimated_s"] = per_sample_s * per_rank * figures["steps"]
    yield from ()
