"""Check the arguments, without model and data."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tr_args import TrainingArguments
from tr_core import plugins
from tr_core.callbacks.defaults import default_callbacks
from tr_core.checkpoint.restoring import find_checkpoint
from tr_core.choose_strategy import usable_strategy
from tr_core.optim.optimizers import build_optimizer, optimizer_factory, parameter_groups
from tr_core.optim.schedules import get_scheduler
from tr_core.preflight.context import CheckContext, logger
from tr_core.single_device import SingleDevice
from tr_core.state import resolve_steps
from tr_core.training import earlier_run
from tr_core.validation import refuse_unsupported, why_not_writable


def check_alone(subject: CheckContext) -> None:
    """Ask of arguments without a Trainer what building one, and its run, would refuse."""
    args = subject.args
    questions: tuple[tuple[str, tuple[str, ...], Callable[[], object]], ...] = (
        ("T003", (), args.check),
        ("T007", (), lambda: refuse_unsupported(args)),
        ("T302", ("report_to",), lambda: default_callbacks(args, SingleDevice("cpu"))),
        ("T303", ("strategy", "fp16", "bf16", "use_cpu"), lambda: _strategy(args)),
        ("T304", ("optim", "optim_args"), lambda: _optimizer(args)),
        ("T304", ("lr_scheduler_type", "lr_scheduler_kwargs"), lambda: _schedule(args, subject.steps or 1)),
    )
    for code, options, ask in questions:
        with subject.saying(code, *options):
            ask()


def _strategy(args: TrainingArguments) -> object:
    """Build the strategy; of several processes, which building would join, only what it would do on one device."""
    name = str(args.strategy)
    if name in ("single", "mps") or (name == "auto" and args.world_size == 1):
        return usable_strategy(args)
    plugins.load("tr.strategies", "ddp" if name == "auto" else name)
    return SingleDevice.from_arguments(args)


def _optimizer(args: TrainingArguments) -> object:
    """Build the optimizer for a layer of one number; one of a package may need a real model: its name is looked up."""
    if str(args.optim) in plugins.available("tr.optimizers"):
        return plugins.load("tr.optimizers", str(args.optim))
    with torch.random.fork_rng(devices=[]):
        return build_optimizer(*optimizer_factory(args), parameter_groups(nn.Linear(1, 1), args.weight_decay))


def _schedule(args: TrainingArguments, steps: int) -> object:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], args.learning_rate)
    options = dict(args.lr_scheduler_kwargs or {})
    return get_scheduler(args.lr_scheduler_type, optimizer, args.get_warmup_steps(steps), steps, options)


def check_events(subject: CheckContext) -> None:
    """Find events that never occur, or only at the end."""
    args, steps = subject.args, subject.steps
    if steps is None or not subject.trains:
        return
    unit = {"steps": "steps", "epoch": "epochs"}.get(str(args.eval_strategy))
    length = getattr(subject, unit) if unit else None
    if length is not None and args.eval_delay > length:
        subject.say(
            "T103",
            f"eval_strategy={str(args.eval_strategy)!r} with eval_delay={args.eval_delay:g} evaluates never in a run "
            f"of {length} {unit}; lower eval_delay",
            "eval_delay",
        )
    if args.get_warmup_steps(steps) >= max(steps, 1):
        subject.say(
            "T105",
            f"warmup_steps={args.warmup_steps:g} is not shorter than the run of {steps} steps, so that learning_rate="
            f"{args.learning_rate:g} is never reached; set it below {steps}, or to a share such as 0.1",
            "warmup_steps",
        )
    for event, code, so in (
        ("eval", "T104", "the only evaluation is that of the last step"),
        ("save", "T106", "a run that is killed starts over"),
        ("logging", "T107", "no loss is logged before the end"),
    ):
        every = getattr(args, f"{event}_steps")
        if getattr(args, f"{event}_strategy") == "steps" and resolve_steps(every, steps) > steps:
            most = f"set it to at most {steps // 2 or 1}, or to a share such as 0.1"
            subject.say(
                code, f"{event}_steps={every:g} is beyond the run's {steps} steps: {so}; {most}", f"{event}_steps"
            )


def check_output_folder(subject: CheckContext) -> None:
    """Find a file at the folder's path, and folders without write permission."""
    if found := why_not_writable(Path(subject.args.output_dir).absolute()):
        subject.say("T201", found, "output_dir")


# Small parts of every checkpoint of a run; a checkpoint of the model alone lacks them.
_SMALL_PARTS = ("run", "scheduler")


def check_checkpoints(subject: CheckContext) -> None:
    """Find the checkpointer; read and verify the checkpoint to resume from, without loading it into the run."""
    args, trainer, resume = subject.args, subject.given_trainer, subject.resume
    if args.save_strategy == "no" and not subject.resumes:
        return
    strategy: Any = SingleDevice("cpu") if trainer is None else trainer.strategy
    with subject.saying("T302", "checkpointer"):
        if trainer is None:
            subject.checkpointer = plugins.load("tr.checkpointers", str(args.checkpointer))(args, strategy)
        else:
            subject.checkpointer = trainer.checkpointer()
    if subject.checkpointer is None or not subject.trains:
        return
    with subject.saying("T205", "resume_from_checkpoint" if subject.resumes else "output_dir"):
        if not subject.resumes:
            if earlier := earlier_run(subject.checkpointer, strategy, args.output_dir):
                subject.say("T208", earlier, "output_dir")
            return
        logger.info("check: verifying the checkpoint to resume from")
        found = find_checkpoint(subject.checkpointer, args.output_dir, resume, only_read=_SMALL_PARTS)
        for text in found.skipped:
            subject.say("T206", text, "resume_from_checkpoint")
        if found.step is not None and subject.steps is not None and found.step >= subject.steps:
            subject.say(
                "T207",
                f"the checkpoint is at step {found.step} of {subject.steps}: there is nothing left to train; raise "
                "num_train_epochs or max_steps to go on",
                "resume_from_checkpoint",
            )
