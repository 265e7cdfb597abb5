"""Check the arguments, without model and data."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tr_args import ArgumentsError
from tr_args.constraints import Only
from tr_args.schema import facts_of_kind
from tr_core import plugins
from tr_core.callbacks.defaults import CALLBACKS_BY_ARGUMENT, tracker_factory
from tr_core.choose_strategy import usable_strategy
from tr_core.optim.optimizers import build_optimizer, optimizer_factory, parameter_groups
from tr_core.optim.schedules import get_scheduler
from tr_core.plugins import PluginError
from tr_core.preflight.context import CheckContext
from tr_core.preflight.origins import argument_problems
from tr_core.signatures import takes_argument
from tr_core.single_device import SingleDevice
from tr_core.state import resolve_steps
from tr_core.validation import why_not_writable


def check_options(subject: CheckContext) -> None:
    """Find options that contradict each other, and options that this version ignores."""
    args = subject.args
    try:
        args.check()
    except ArgumentsError as error:
        subject.problems += argument_problems(error, subject.origin)
    for name, only in facts_of_kind(type(args), Only).items():
        if (value := getattr(args, name)) != only.value:
            subject.say("T007", f"{name}={value!r} cannot be used with this version; {only.reason}", name)


def check_plugins(subject: CheckContext) -> None:
    """Find names of optimizers, strategies, checkpointers, trackers and callbacks that no installed package has."""
    args = subject.args
    for name in args.report_to:
        with subject.saying("T302", "report_to"):
            if name not in ("none", "all"):
                tracker_factory(name)(args)
    strategy = str(args.strategy)
    automatic = "ddp" if args.world_size > 1 else "single"
    needed: list[tuple[str, str, tuple[str, ...]]] = [
        ("tr.callbacks", name, (option,)) for name, option in CALLBACKS_BY_ARGUMENT.items() if getattr(args, option)
    ]
    needed.append(("tr.strategies", automatic if strategy == "auto" else strategy, ("strategy",)))
    if args.save_strategy != "no" or args.resume_from_checkpoint not in (None, False):
        needed.append(("tr.checkpointers", str(args.checkpointer), ("checkpointer", "save_strategy")))
    for group, name, options in needed:
        values = " and ".join(f"{option}={str(getattr(args, option))!r}" for option in options)
        with subject.saying("T302", options[0], what=f"{values}: "):
            plugins.load(group, name)


def check_optimizer_name(subject: CheckContext) -> None:
    """Build the optimizer for a layer of one number: it shows whether there is one, and whether it takes the options.

    One of a package may need a real model: only its name is looked up.
    """
    args = subject.args
    name = str(args.optim)
    with subject.saying("T304", "optim" if not args.optim_args else "optim_args", what=f"optim={name!r}: "):
        if name in plugins.available("tr.optimizers"):
            plugins.load("tr.optimizers", name)
            return
        factory = optimizer_factory(args)
        with torch.random.fork_rng(devices=[]):
            layer = nn.Linear(1, 1)
        build_optimizer(*factory, parameter_groups(layer, args.weight_decay))


def check_device(subject: CheckContext) -> None:
    """Find a precision that the device lacks, and a launch environment that does not fit the strategy.

    A strategy of several processes is not built, because building joins them. Its precision is checked as for one
    device.
    """
    args = subject.args
    with subject.saying("T303", "strategy", "fp16", "bf16", "use_cpu"), suppress(PluginError):  # found with the names
        if args.strategy in ("single", "mps") or (args.strategy == "auto" and args.world_size == 1):
            usable_strategy(args)
        else:
            SingleDevice.from_arguments(args)


def steps_with(subject: CheckContext, event: str) -> set[float] | None:
    """Return the steps at which the run evaluates (`eval`) or saves (`save`); None if they are not known before it.

    The end of an epoch is a step with a fraction where a run is not a whole number of epochs.
    """
    args, steps, epochs = subject.args, subject.steps, subject.epochs
    strategy = str(getattr(args, f"{event}_strategy"))
    if strategy == "no":
        return set()
    if strategy == "best":
        return steps_with(subject, "eval")
    delay = args.eval_delay if event == "eval" else 0
    if strategy == "steps" and steps is not None:
        every = resolve_steps(getattr(args, f"{event}_steps"), steps)
        return {step for step in (*range(every, steps, every), steps) if step >= delay}
    if strategy == "epoch" and steps is not None and epochs is not None:
        return {steps * epoch / epochs for epoch in range(1, epochs + 1) if epoch >= delay}
    return None


def check_events(subject: CheckContext) -> None:
    """Find events that never occur, or only at the end."""
    args, steps = subject.args, subject.steps
    if steps is None or not subject.trains:
        return

    def beyond(event: str) -> float:
        if getattr(args, f"{event}_strategy") != "steps":
            return 0
        value = getattr(args, f"{event}_steps")
        return value if resolve_steps(value, steps) > steps else 0

    if args.eval_strategy != "no" and steps_with(subject, "eval") == set():
        length = f"{steps} steps" if args.eval_strategy == "steps" else f"{subject.epochs} epochs"
        watched = f"; {args.metric_for_best_model!r} then chooses no best model" if args.metric_for_best_model else ""
        subject.say(
            "T103",
            f"eval_strategy={str(args.eval_strategy)!r} with eval_delay={args.eval_delay:g} evaluates never in a run "
            f"of {length}{watched}; lower eval_delay",
            "eval_delay",
        )
    elif every := beyond("eval"):
        subject.say(
            "T104",
            f"eval_steps={every:g} is beyond the run's {steps} steps, so that the only evaluation is that of the last "
            f"step; set it to at most {steps // 2 or 1}, or to a share such as 0.1",
            "eval_steps" if subject.origin("eval_steps") != "default" else "logging_steps",
        )
    if args.get_warmup_steps(steps) >= max(steps, 1):
        subject.say(
            "T105",
            f"warmup_steps={args.warmup_steps:g} is not shorter than the run of {steps} steps, so that learning_rate="
            f"{args.learning_rate:g} is never reached; set it below {steps}, or to a share such as 0.1",
            "warmup_steps",
        )
    for event, code, without in (
        ("save", "T106", "a run that is killed starts over"),
        ("logging", "T107", "no loss is logged before the end"),
    ):
        if every := beyond(event):
            subject.say(code, f"{event}_steps={every:g} is beyond the run's {steps} steps: {without}", f"{event}_steps")


def check_schedule(subject: CheckContext) -> None:
    """Build the schedule for another optimizer, because it would change the run's."""
    args, trainer = subject.args, subject.given_trainer
    if trainer is not None and (not subject.trains or trainer.lr_scheduler is not None):
        return
    rates = [group["lr"] for group in subject.optimizer.param_groups] if subject.optimizer else [args.learning_rate]
    groups = [{"params": [torch.zeros(1, requires_grad=True)], "lr": rate} for rate in rates]
    other, steps = torch.optim.SGD(groups, momentum=0.9), subject.steps or 1
    with subject.saying("T305", "lr_scheduler_kwargs" if args.lr_scheduler_kwargs else "lr_scheduler_type"):
        if trainer is None:
            options = dict(args.lr_scheduler_kwargs or {})
            get_scheduler(args.lr_scheduler_type, other, args.get_warmup_steps(steps), steps, options)
        elif takes_argument(trainer.create_scheduler, "optimizer"):  # else it would change the run's optimizer
            trainer.create_scheduler(num_training_steps=steps, optimizer=other)


def check_output_folder(subject: CheckContext) -> None:
    """Find a file at the folder's path, and folders without write permission."""
    if found := why_not_writable(Path(subject.args.output_dir).absolute()):
        subject.say("T201", found, "output_dir")


class _OneProcess:
    """The attributes of a strategy that a checkpointer reads, for one process."""

    device, rank, local_rank, world_size = torch.device("cpu"), 0, 0, 1

    def gather_objects(self, value: Any) -> list[Any]:
        return [value]


# Small parts of every checkpoint of a run; a checkpoint of the model alone lacks them.
_SMALL_PARTS = ("run", "scheduler")


def check_resume(subject: CheckContext) -> None:
    """Read and verify the checkpoint to resume from, without loading it into the run."""
    checkpointer, resume, output_dir = checkpointer_of(subject), subject.resume, subject.args.output_dir
    if checkpointer is None or not subject.trains:
        return
    if resume in (None, False):
        with subject.saying("T205", "output_dir"):
            if steps := checkpointer.steps():
                subject.say(
                    "T208",
                    f"{output_dir!r} holds checkpoints of an earlier run, up to step {steps[-1]}: resuming takes those "
                    "until this run has saved its first, a save of the same step replaces one, and save_total_limit "
                    "leaves the others; give every run an output_dir of its own, or remove them with `trainer ckpt "
                    "prune`",
                    "output_dir",
                )
        return
    option, asked = "resume_from_checkpoint", f"resume_from_checkpoint={resume!r}"
    source = None if resume is True or str(resume) in ("auto", "True", "true") else str(resume)
    subject.progress("verifying the checkpoint to resume from")
    try:
        if source is not None and source.partition(":")[0] != "hub" and not Path(source).exists():
            subject.say("T204", f"{asked}: there is no such folder; give a checkpoint's folder, or True", option)
            return
        step = checkpointer.restore({}, source=source, only_read=_SMALL_PARTS)
    except (ValueError, OSError) as error:
        subject.say("T205", f"{asked}: {error}", option)
        return
    for text in checkpointer.restored.skipped:
        subject.say("T206", text, option)
    if step is None and str(resume) != "auto":
        subject.say(
            "T204",
            f"{asked}, but there is no valid checkpoint in {output_dir!r}; give the folder of one, or 'auto' to start "
            "over where there is none",
            option,
        )
    elif step is not None and subject.steps is not None and step >= subject.steps:
        subject.say(
            "T207",
            f"the checkpoint is at step {step} of {subject.steps}: there is nothing left to train; raise "
            "num_train_epochs or max_steps to go on",
            option,
        )


def checkpointer_of(subject: CheckContext) -> Any:
    """Return the run's checkpointer; None if the run saves nothing or the checkpointer is not installed."""
    args = subject.args
    if args.save_strategy == "no" and subject.resume in (None, False):
        return None
    if subject.given_trainer is not None:
        return subject.trainer.checkpointer()
    with suppress(PluginError):  # found with the names
        return plugins.load("tr.checkpointers", str(args.checkpointer))(args, _OneProcess())
    return None
