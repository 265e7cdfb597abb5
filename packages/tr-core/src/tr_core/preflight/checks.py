"""Run the checks one after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tr_args import TrainingArguments
from tr_core.callback import CallbackList
from tr_core.changes import assigned
from tr_core.preflight import argument_checks, data_checks, model_checks, resource_checks
from tr_core.preflight.context import CheckContext, logger
from tr_core.preflight.report import Report
from tr_core.trainer_methods import TrainerMethods
from tr_log.events_file import whole_size

# Checks of arguments alone, and of a Trainer: later ones use results of earlier ones.
_ARGUMENT_CHECKS = (
    argument_checks.check_alone,
    argument_checks.check_events,
    argument_checks.check_output_folder,
    argument_checks.check_checkpoints,
    resource_checks.check_disk_space,
)
_TRAINER_CHECKS = (
    data_checks.check_length,
    argument_checks.check_events,
    argument_checks.check_output_folder,
    argument_checks.check_checkpoints,
    model_checks.check_trainable,
    data_checks.check_first_batch,
    data_checks.check_samples,
    model_checks.check_forward_backward,
    model_checks.check_loss_division,
    model_checks.check_evaluation,
    resource_checks.check_optimizer,
    resource_checks.check_disk_space,
)


def check(
    trainer: TrainerMethods,
    *,
    resume: Any = None,
    evaluation_data: Any = None,
    trains: bool = True,
    ends_here: bool = False,
) -> Report:
    """Check what would stop or spoil a run of `trainer`, without training a step.

    It runs two samples forward and backward. Nothing is written or sent, and no callback is called. Every rank must
    call it. The first one logs what is about to take time.

    Nothing is restored: it changes gradients, buffers, random number generators, and counters of data sets and
    collators. So `train`, `evaluate` and `predict` of this Trainer raise afterwards. Build a new one, with a new model
    and new data.

    Args:
        trainer: the Trainer to check.
        resume: the checkpoint to resume from; None for `resume_from_checkpoint` of the arguments.
        evaluation_data: data to evaluate, if not the Trainer's own.
        trains: whether the run trains, so that there must be training data.
        ends_here: whether the data is not used afterwards, so that a read-once stream may be read.

    Returns:
        Problems and figures; `print` shows them.

    Raises:
        RuntimeError: the Trainer is training.
    """
    if trainer.is_in_train:
        raise RuntimeError("check() was called while this Trainer is training; check another Trainer, before its run")
    trainer.is_checked = True
    args = trainer.args
    # A trial run does not resume.
    resume = False if args.fast_dev_run else args.resume_from_checkpoint if resume is None else resume
    handler, model = trainer.callback_handler, trainer.model
    subject = CheckContext(args, trainer, resume, evaluation_data, trains, ends_here, callbacks=[*handler.callbacks])
    logger.info("check: preparing the model")
    with (
        subject.saying("T303", what="the strategy cannot prepare the model: "),
        assigned(trainer, callback_handler=CallbackList(handler.context)),
    ):
        trainer.prepare().zero_grad(set_to_none=True)
        subject.figures |= {
            "model": type(model).__name__,
            "device": str(trainer.strategy.device),
            "world_size": trainer.strategy.world_size,
            "parameters": sum(map(whole_size, model.parameters())),
            "trainable_parameters": sum(
                whole_size(parameter) for parameter in model.parameters() if parameter.requires_grad
            ),
        }
        _run(_TRAINER_CHECKS, subject)
    return Report(type(trainer).__name__, subject.problems, subject.figures)


def check_arguments(args: TrainingArguments, target: str) -> Report:
    """Check arguments alone, without model and data."""
    subject = CheckContext(args, resume=args.resume_from_checkpoint)
    if args.max_steps > 0:
        subject.steps = subject.figures["steps"] = args.max_steps
    _run(_ARGUMENT_CHECKS, subject)
    subject.say("T010", "a configuration file says nothing of data, model, loss and metrics: check the script for that")
    return Report(target, subject.problems, subject.figures)


def _run(checks: Sequence[Callable[[CheckContext], None]], subject: CheckContext) -> None:
    for each in checks:
        with subject.saying("T012", what=f"{each.__name__.replace('_', ' ')} (the other checks were made): "):
            each(subject)
