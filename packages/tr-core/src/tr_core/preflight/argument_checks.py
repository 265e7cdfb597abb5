"""Check the arguments, without model and data."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tr_args import ArgumentsError
from tr_core import plugins
from tr_core.callbacks.defaults import CALLBACKS_BY_ARGUMENT, tracker_factory
from tr_core.choose_strategy import usable_strategy
from tr_core.optim.optimizers import build_optimizer, optimizer_factory, optimizer_names, parameter_groups
from tr_core.optim.schedules import get_scheduler
from tr_core.plugins import PluginError
from tr_core.preflight.context import CheckContext
from tr_core.preflight.origins import argument_problems, unsupported_problems
from tr_core.preflight.report import Problem
from tr_core.signatures import takes_argument
from tr_core.single_device import SingleDevice
from tr_core.state import resolve_steps
from tr_core.validation import refuse_unsupported, why_not_writable


def check_options(subject: CheckContext) -> Iterator[Problem]:
    """Find options that contradict each other, and options that this version ignores."""
    try:
        subject.args.check()
    except ArgumentsError as error:
        yield from argument_problems(error, subject.origin, type(subject.args))
    try:
        refuse_unsupported(subject.args)
    except ValueError as error:
        yield from unsupported_problems(error, subject.origin)


def check_plugins(subject: CheckContext) -> Iterator[Problem]:
    """Find names of optimizers, strategies, checkpointers and trackers that no installed package has."""
    args = subject.args
    yield from _check_callbacks(subject)
    yield from _check_optimizer_name(subject)
    strategy = str(args.strategy)
    if strategy == "auto":
        strategy = "ddp" if args.world_size > 1 else "single"
    yield from _check_name(subject, "tr.strategies", strategy, "strategy")
    if args.save_strategy != "no" or args.resume_from_checkpoint not in (None, False):
        yield from _check_name(subject, "tr.checkpointers", str(args.checkpointer), "checkpointer", "save_strategy")


def _check_name(subject: CheckContext, group: str, name: str, *options: str) -> Iterator[Problem]:
    try:
        plugins.load(group, name)
    except plugins.PluginError as error:
        values = " and ".join(f"{option}={str(getattr(subject.args, option))!r}" for option in options)
        yield Problem("T301", f"{values}: {error}", subject.origin(options[0]))
    except ImportError as error:
        yield Problem("T302", f"{options[0]}={name!r}: {error}", subject.origin(options[0]))


def _check_callbacks(subject: CheckContext) -> Iterator[Problem]:
    args = subject.args
    for name in [name for name in args.report_to if name not in ("none", "all")]:
        try:
            tracker_factory(name)(args)
        except plugins.PluginError as error:
            yield Problem("T301", str(error), subject.origin("report_to"))
        except ImportError as error:
            yield Problem("T302", str(error), subject.origin("report_to"))
    for name, option in CALLBACKS_BY_ARGUMENT.items():
        if getattr(args, option):
            yield from _check_name(subject, "tr.callbacks", name, option)


def _check_optimizer_name(subject: CheckContext) -> Iterator[Problem]:
    args, origin = subject.args, subject.origin("optim")
    name = str(args.optim)
    if name not in optimizer_names():
        try:
            optimizer_factory(args)
        except plugins.PluginError as error:
            yield Problem("T301", f"optim={name!r}: {error}", origin)
        return
    if name in plugins.available("tr.optimizers"):
        yield from _check_name(subject, "tr.optimizers", name, "optim")
        return
    try:  # torch's own: a layer of one number checks whether they take the options
        with torch.random.fork_rng(devices=[]):
            layer = nn.Linear(1, 1)
        build_optimizer(*optimizer_factory(args), parameter_groups(layer, args.weight_decay))
    except (ValueError, TypeError) as error:
        yield Problem("T304", str(error), subject.origin("optim_args"))


_DEVICE_OPTIONS = ("strategy", "fp16", "bf16", "use_cpu")


def check_device(subject: CheckContext) -> Iterator[Problem]:
    """Find a precision that the device lacks, and a launch environment that does not fit the strategy.

    A strategy of several processes is not built, because building joins them. Its precision is checked as for one
    device.
    """
    args = subject.args
    try:
        if args.strategy in ("single", "mps") or (args.strategy == "auto" and args.world_size == 1):
            usable_strategy(args)
        else:
            SingleDevice.from_arguments(args)
    except PluginError:
        return  # reported with the names
    except ValueError as error:
        given = [subject.origin(name) for name in _DEVICE_OPTIONS]
        origins = [origin for origin in given if origin not in ("default", "")]
        yield Problem("T303", str(error), ", ".join(origins))


def check_events(subject: CheckContext) -> Iterator[Problem]:
    """Find events that never occur, or only at the end."""
    if subject.steps is None or not subject.trains:
        return
    yield from _check_evaluations(subject, subject.steps)
    yield from _check_warmup(subject, subject.steps)
    yield from _check_saves_and_logs(subject, subject.steps)


def evaluation_count(subject: CheckContext, steps: int) -> int | None:
    """Count the evaluations during training; None unless the strategy is one of steps or epochs."""
    args = subject.args
    if args.eval_strategy == "no":
        return 0
    if args.eval_strategy == "steps":
        every = resolve_steps(args.eval_steps, steps)
        inner = len([step for step in range(every, steps, every) if step >= args.eval_delay])
        return inner + int(args.eval_delay <= steps)
    if args.eval_strategy == "epoch" and subject.epochs is not None:
        return len([epoch for epoch in range(1, subject.epochs + 1) if epoch >= args.eval_delay])
    return None


def _check_evaluations(subject: CheckContext, steps: int) -> Iterator[Problem]:
    args = subject.args
    strategy = str(args.eval_strategy)
    if evaluation_count(subject, steps) == 0 and strategy != "no":
        length = f"{steps} steps" if strategy == "steps" else f"{subject.epochs} epochs"
        watched = f"; {args.metric_for_best_model!r} then chooses no best model" if args.metric_for_best_model else ""
        yield Problem(
            "T103",
            f"eval_strategy={strategy!r} with eval_delay={args.eval_delay:g} evaluates never in a run of {length}"
            f"{watched}; lower eval_delay",
            subject.origin("eval_delay"),
        )
    elif strategy == "steps" and resolve_steps(args.eval_steps, steps) > steps:
        name = "eval_steps" if subject.origin("eval_steps") != "default" else "logging_steps"
        yield Problem(
            "T104",
            f"eval_steps={args.eval_steps:g} is beyond the run's {steps} steps, so that the only evaluation is that of "
            f"the last step; set it to at most {steps // 2 or 1}, or to a share such as 0.1",
            subject.origin(name),
        )


def _check_warmup(subject: CheckContext, steps: int) -> Iterator[Problem]:
    warmup = subject.args.get_warmup_steps(steps)
    if warmup >= steps and warmup:
        yield Problem(
            "T105",
            f"warmup_steps={subject.args.warmup_steps:g} is not shorter than the run of {steps} steps, so that "
            f"learning_rate={subject.args.learning_rate:g} is never reached; set it below {steps}, or to a share such "
            "as 0.1",
            subject.origin("warmup_steps"),
        )


def _check_saves_and_logs(subject: CheckContext, steps: int) -> Iterator[Problem]:
    args = subject.args
    if args.save_strategy == "steps" and (every := resolve_steps(args.save_steps, steps)) > steps:
        yield Problem(
            "T106",
            f"save_steps={every} is beyond the run's {steps} steps: a run that is killed starts over",
            subject.origin("save_steps"),
        )
    if args.logging_strategy == "steps" and (every := resolve_steps(args.logging_steps, steps)) > steps:
        yield Problem(
            "T107",
            f"logging_steps={every} is beyond the run's {steps} steps: no loss is logged before the end",
            subject.origin("logging_steps"),
        )


def check_schedule(subject: CheckContext) -> Iterator[Problem]:
    """Build the schedule for a dummy optimizer, because it would change the run's."""
    args, trainer = subject.args, subject.given_trainer
    if trainer is not None and (not subject.trains or trainer.lr_scheduler is not None):
        return
    steps = subject.steps or 1
    stand_in = _dummy_optimizer(subject.optimizer, args.learning_rate)
    try:
        if trainer is not None:
            if takes_argument(trainer.create_scheduler, "optimizer"):  # else it would change the run's optimizer
                trainer.create_scheduler(num_training_steps=steps, optimizer=stand_in)
        else:
            get_scheduler(
                args.lr_scheduler_type,
                stand_in,
                args.get_warmup_steps(steps),
                steps,
                dict(args.lr_scheduler_kwargs or {}),
            )
    except (ValueError, TypeError) as error:
        name = "lr_scheduler_kwargs" if args.lr_scheduler_kwargs else "lr_scheduler_type"
        yield Problem("T305", str(error), subject.origin(name))


def _dummy_optimizer(optimizer: torch.optim.Optimizer | None, learning_rate: float) -> torch.optim.Optimizer:
    rates = [learning_rate] if optimizer is None else [group["lr"] for group in optimizer.param_groups]
    groups = [{"params": [torch.zeros(1, requires_grad=True)], "lr": rate} for rate in rates]
    return torch.optim.SGD(groups, momentum=0.9)


def check_output_folder(subject: CheckContext) -> Iterator[Problem]:
    """Find a file at the folder's path, and folders without write permission."""
    if found := why_not_writable(Path(subject.args.output_dir).absolute()):
        yield Problem("T201", found, subject.origin("output_dir"))


class _OneProcess:
    """The attributes of a strategy that a checkpointer reads, for one process."""

    device, rank, local_rank, world_size = torch.device("cpu"), 0, 0, 1

    def gather_objects(self, value: Any) -> list[Any]:
        return [value]


# Small parts of every checkpoint of a run; a checkpoint of the model alone lacks them.
_SMALL_PARTS = ("run", "scheduler")


def check_resume(subject: CheckContext) -> Iterator[Problem]:
    """Read and verify the checkpoint to resume from, without loading it into the run."""
    checkpointer = checkpointer_of(subject)
    if checkpointer is None or not subject.trains:
        return
    resume = subject.resume
    if resume in (None, False):
        yield from _earlier_checkpoints(subject, checkpointer)
        return
    automatic = resume is True or str(resume) in ("auto", "True", "true")
    source, origin = None if automatic else str(resume), subject.origin("resume_from_checkpoint")
    is_at_hub = source is not None and source.partition(":")[0] == "hub"  # the checkpointer resolves these
    if source is not None and not is_at_hub and _is_missing(Path(source)):
        message = f"resume_from_checkpoint={source!r}: there is no such folder; give a checkpoint's folder, or True"
        yield Problem("T204", message, origin)
        return
    subject.progress("verifying the checkpoint to resume from")
    try:
        step = checkpointer.restore({}, source=source, only_read=_SMALL_PARTS)
    except (ValueError, OSError) as error:
        yield Problem("T205", f"resume_from_checkpoint={resume!r}: {error}", origin)
        return
    for text in checkpointer.restored.skipped:
        yield Problem("T206", text, origin)
    if step is None and str(resume) != "auto":
        yield Problem(
            "T204",
            f"resume_from_checkpoint={resume!r}, but there is no valid checkpoint in {subject.args.output_dir!r}; give "
            "the folder of one, or 'auto' to start over where there is none",
            origin,
        )
    elif step is not None and subject.steps is not None and step >= subject.steps:
        message = f"the checkpoint is at step {step} of {subject.steps}: there is nothing left to train; raise "
        yield Problem("T207", f"{message}num_train_epochs or max_steps to go on", origin)


def _is_missing(source: Path) -> bool:
    try:
        source.stat()
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return True
    except OSError:  # no evidence that it is missing: reading it will raise the actual error
        return False
    return False


def checkpointer_of(subject: CheckContext) -> Any:
    """Return the run's checkpointer; None if the run saves nothing or the checkpointer is not installed."""
    args = subject.args
    if args.save_strategy == "no" and subject.resume in (None, False):
        return None
    if subject.given_trainer is not None:
        return subject.trainer.checkpointer()
    try:
        return plugins.load("tr.checkpointers", str(args.checkpointer))(args, _OneProcess())
    except plugins.PluginError:
        return None  # reported with the names


def _earlier_checkpoints(subject: CheckContext, checkpointer: Any) -> Iterator[Problem]:
    try:
        steps = checkpointer.steps()
    except ValueError as error:
        yield Problem("T205", str(error), subject.origin("output_dir"))
        return
    if steps:
        yield Problem(
            "T208",
            f"{subject.args.output_dir!r} holds checkpoints of an earlier run, up to step {steps[-1]}: resuming takes "
            "those until this run has saved its first, a save of the same step replaces one, and save_total_limit "
            "leaves the others; give every run an output_dir of its own, or remove them with `trainer ckpt prune`",
            subject.origin("output_dir"),
        )
