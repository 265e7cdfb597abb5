"""Compare the space that a run's checkpoints need at the same time with what is free."""

from __future__ import annotations

import copy
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from tr_core.conditions.output_folder import nearest_existing
from tr_core.preflight.events import evaluation_count, resolve
from tr_core.preflight.report import Problem
from tr_core.preflight.resume_source import checkpointer_of
from tr_core.preflight.subject import Subject
from tr_core.protocols import EvaluationWeights, Stateful
from tr_core.saving import model_parts
from tr_log.wording import size


def check_disk_space(subject: Subject) -> Iterator[Problem]:
    """Reckon the most space that is in use at once: the checkpoints kept, the one being written, copies for a Hub."""
    args, figures = subject.args, subject.figures
    folder = nearest_existing(Path(args.output_dir).absolute())
    free = figures["disk_free_bytes"] = shutil.disk_usage(folder).free
    if args.save_strategy == "no" or not subject.trains:
        return
    count = figures["checkpoints_at_once"] = at_once(subject)
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


def at_once(subject: Subject) -> int | None:
    """Return how many checkpoints are on the disk at once at most, the one being written included.

    An older one is removed only once the newest is complete, and the best one always stays. None where neither the
    arguments nor the data limit the number.
    """
    args = subject.args
    written = _written(subject)
    if args.save_total_limit is None:
        limit = written
    else:
        with_best = 1 + bool(args.metric_for_best_model and args.eval_strategy != "no")
        kept = max(args.save_total_limit, with_best) + 1
        limit = kept if written is None else min(kept, written)
    existing = _existing(subject)
    return limit if limit is None or not existing else max(limit - existing, 1)


def _written(subject: Subject) -> int | None:
    """Count the checkpoints that the run writes; None if unknown."""
    args, steps = subject.args, subject.steps
    if steps is None:
        return None
    evaluations = evaluation_count(subject, steps)
    if args.save_strategy == "best":
        return evaluations
    planned = {"steps": math.ceil(steps / resolve(args.save_steps, steps)), "epoch": subject.epochs}
    written = planned.get(str(args.save_strategy))
    if not args.load_best_model_at_end or written is None or _falls_together(args):
        return written
    # A model that an evaluation finds the best so far is saved at once.
    return None if evaluations is None else min(written + evaluations, steps)


def _falls_together(args: Any) -> bool:
    """Whether every evaluation comes with a checkpoint anyway."""
    strategies = {str(args.save_strategy), str(args.eval_strategy)}
    if strategies == {"steps"}:
        return args.eval_steps == args.save_steps or (
            args.eval_steps >= 1 <= args.save_steps and args.eval_steps % args.save_steps == 0
        )
    return strategies == {"epoch"}


def _existing(subject: Subject) -> int:
    if subject.resume in (None, False):
        return 0
    checkpointer = checkpointer_of(subject)
    try:
        return 0 if checkpointer is None else len(checkpointer.steps())
    except ValueError:  # said where the checkpoint to resume from is looked at
        return 0


def _model_bytes(trainer: Any) -> int:
    return tensor_bytes([part.state_dict() for part in model_parts(trainer).values()])


def _other_bytes(subject: Subject) -> int:
    """Return the size of what callbacks save beside model and optimizer."""
    trainer = subject.trainer
    held = [part.state_dict() for part in subject.callbacks if isinstance(part, Stateful)]
    for callback in subject.callbacks:
        if isinstance(callback, EvaluationWeights):
            # Of a copy: the weights that it keeps begin with the run.
            held += [part.state_dict() for part in copy.copy(callback).weight_parts(trainer.model).values()]
    return tensor_bytes(held)


def tensor_bytes(tree: Any) -> int:
    """Return the size of all tensors inside mappings, lists and tuples; one that is there twice counts once."""
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
