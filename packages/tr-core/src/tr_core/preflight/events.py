"""Look whether evaluations, checkpoints, logs and the end of the warmup fall into the run."""

from __future__ import annotations

import math
from collections.abc import Iterator

from tr_core.preflight.report import Problem
from tr_core.preflight.subject import Subject


def check_events(subject: Subject) -> Iterator[Problem]:
    """Find events that never come, or only at the end."""
    if subject.steps is None or not subject.trains:
        return
    yield from _evaluation(subject, subject.steps)
    yield from _warmup(subject, subject.steps)
    yield from _rare(subject, subject.steps)


def resolve(value: float | None, steps: int) -> int:
    """Return a number of steps that may be given as a share of the run below 1; None is the whole run."""
    if value is None:
        return steps
    return max(math.ceil(value * steps) if value < 1 else int(value), 1)


def evaluation_count(subject: Subject, steps: int) -> int | None:
    """Count the evaluations during training; None where the strategy is not one of steps or epochs."""
    args = subject.args
    if args.eval_strategy == "no":
        return 0
    if args.eval_strategy == "steps":
        every = resolve(args.eval_steps, steps)
        inner = len([step for step in range(every, steps, every) if step >= args.eval_delay])
        return inner + int(args.eval_delay <= steps)
    if args.eval_strategy == "epoch" and subject.epochs is not None:
        return len([epoch for epoch in range(1, subject.epochs + 1) if epoch >= args.eval_delay])
    return None


def _evaluation(subject: Subject, steps: int) -> Iterator[Problem]:
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
    elif strategy == "steps" and resolve(args.eval_steps, steps) > steps:
        name = "eval_steps" if subject.origin("eval_steps") != "default" else "logging_steps"
        yield Problem(
            "T104",
            f"eval_steps={args.eval_steps:g} is beyond the run's {steps} steps, so that the only evaluation is that of "
            f"the last step; set it to at most {steps // 2 or 1}, or to a share such as 0.1",
            subject.origin(name),
        )


def _warmup(subject: Subject, steps: int) -> Iterator[Problem]:
    warmup = subject.args.get_warmup_steps(steps)
    if warmup >= steps and warmup:
        yield Problem(
            "T105",
            f"warmup_steps={subject.args.warmup_steps:g} is not shorter than the run of {steps} steps, so that "
            f"learning_rate={subject.args.learning_rate:g} is never reached; set it below {steps}, or to a share such "
            "as 0.1",
            subject.origin("warmup_steps"),
        )


def _rare(subject: Subject, steps: int) -> Iterator[Problem]:
    args = subject.args
    if args.save_strategy == "steps" and (every := resolve(args.save_steps, steps)) > steps:
        yield Problem(
            "T106",
            f"save_steps={every} is beyond the run's {steps} steps: a run that is killed begins anew",
            subject.origin("save_steps"),
        )
    if args.logging_strategy == "steps" and (every := resolve(args.logging_steps, steps)) > steps:
        yield Problem(
            "T107",
            f"logging_steps={every} is beyond the run's {steps} steps: no loss is logged before the end",
            subject.origin("logging_steps"),
        )
