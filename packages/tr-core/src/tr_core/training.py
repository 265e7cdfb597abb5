"""Begin a run at its first or its restored step, and summarize it after its last."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, cast

from torch import nn

from tr_args import TrainingArguments
from tr_core.changes import watching_modules
from tr_core.checkpoint.adapters import restore_parts
from tr_core.data.position import DataPosition
from tr_core.data.virtual_shards import replicas
from tr_core.loop import end_epoch, save, what_is_due
from tr_core.plan import TrainingPlan
from tr_core.preemption.preemption import Preemption
from tr_core.protocols import Checkpointer, Collectives, Stateful, Strategy
from tr_core.results import speed_metrics
from tr_core.run import Run
from tr_core.state import TrainerState
from tr_log import get_logger
from tr_log.phases import CHECKPOINT, PhaseClock, phase

logger = get_logger("tr_core.trainer")


@contextmanager
def preempting(run: Run) -> Iterator[None]:
    """Return a block for training: a signal may end it between two steps, and new modules of a model are noticed."""
    run.preemption = Preemption(run.methods, run.strategy, run.position, partial(save, run), run.writes_in_background)

    def note() -> None:
        run.methods.has_assignments = True

    with run.preemption.watching(), nullcontext() if run.strategy.forward_is_collective else watching_modules(note):
        yield


def fresh_state(
    args: TrainingArguments, strategy: Collectives, plan: TrainingPlan, trial: Mapping[str, Any]
) -> TrainerState:
    """Return the state of a new run."""
    state = TrainerState(
        epoch=0.0,
        max_steps=plan.max_steps,
        num_train_epochs=plan.num_epochs,
        train_batch_size=args.train_batch_size,
        is_local_process_zero=strategy.local_rank == 0,
        is_world_process_zero=strategy.rank == 0,
        **trial,
    )
    state.compute_steps(args, plan.max_steps)
    return state


def earlier_run(checkpointer: Checkpointer, strategy: Collectives, output_dir: str) -> str:
    """Return what follows if a new run saves among the checkpoints of another run; empty if there are none."""
    earlier, problem = [], ""
    if strategy.rank == 0:
        try:
            earlier = checkpointer.steps()
        except ValueError as error:
            problem = str(error)
    if problem := strategy.gather_objects(problem)[0]:
        raise ValueError(problem)  # the first save would fail too
    if not earlier:
        return ""
    return (
        f"{output_dir} holds checkpoints of an earlier run, up to step {earlier[-1]}: resuming takes those until this "
        "run has saved its first, a save of the same step replaces one, and save_total_limit leaves the others; give "
        "every run an output_dir of its own, or remove them with `trainer ckpt prune`"
    )


def log_run_start(run: Run, num_parameters: int, schedule: str) -> None:
    """Log what is trained, how, on what, for how long, and where its files go.

    Args:
        run: the run, at its first or its restored step.
        num_parameters: trainable numbers.
        schedule: name of the learning rate's schedule.
    """
    args, plan, strategy, model = run.methods.args, run.plan, run.strategy, run.methods.model
    rates = dict.fromkeys(f"{group.get('initial_lr', group['lr']):.4g}" for group in run.optimizer.param_groups)
    samples = "unknown number of samples" if run.data.num_samples is None else f"{run.data.num_samples:,} samples"
    factors = [f"{args.train_batch_size} on a device"]
    factors += [f"{plan.accumulation} micro-batches"] if plan.accumulation > 1 else []
    number = replicas(args, strategy.data)
    kind = "virtual shards" if args.elastic else "processes" if number == strategy.world_size else "replicas"
    factors += [f"{number} {kind}"] if number > 1 else []
    lines = {
        "model": f"{type(model).__name__}, {num_parameters:,} trainable parameters",
        "optimizer": f"{type(run.optimizer).__name__}, learning rate {' and '.join(rates)}, schedule {schedule}"
        + (f", warmup over {args.get_warmup_steps(plan.max_steps)} of {plan.max_steps:,}" if args.warmup_steps else ""),
        "precision": _precision(args, model),
        "averaging": f"decay {args.ema_decay}; evaluations and saved models use the averaged weights"
        if args.ema_decay is not None
        else "",
        "batch": f"{plan.samples_per_step} samples a step" + (f" = {' x '.join(factors)}" if factors[1:] else ""),
        "data": f"{samples} an epoch, {plan.max_steps:,} steps"
        + (f", of which {run.window.first_step:,} are done" if run.window.first_step else ""),
        "device": f"{strategy.device}" + (f" x {strategy.world_size}" if strategy.world_size > 1 else ""),
        "output": os.path.abspath(args.output_dir),
    }
    rows = (f"\n  {name:<10} {text}" for name, text in lines.items() if text)
    level = logging.DEBUG if run.methods.state.is_hyper_param_search else logging.INFO  # of many trials it is too much
    logger.log(level, "training begins%s", "".join(rows))


def _precision(args: TrainingArguments, model: nn.Module) -> str:
    dtypes = dict.fromkeys(str(p.dtype).removeprefix("torch.") for p in model.parameters() if p.is_floating_point())
    mixed = "bfloat16" if args.bf16 else "float16 with a scaled loss" if args.fp16 else ""
    return f"weights in {' and '.join(dtypes)}" + (f", computed in {mixed} by autocast" if mixed else "")


def summarize(run: Run) -> dict[str, Any]:
    """Wait for background saves, close the log window, and return the figures of the whole run."""
    state, window, plan = run.methods.state, run.window, run.plan
    steps = state.global_step - window.first_step
    with phase(CHECKPOINT):
        run.preemption.wait()
    if run.strategy.world_size > 1:
        _report_times(run.strategy, run.window.clock)
    run.close_window()
    share = steps / max(plan.max_steps, 1)
    metrics = speed_metrics("train", window.start_s, num_samples=plan.num_samples * share, num_steps=steps)
    return {**metrics, "total_flos": state.total_flos, "train_loss": window.mean_loss(steps)}


def _report_times(strategy: Strategy, clock: PhaseClock) -> None:
    """Report what each process spent its time on, which no process knows alone. Collective."""
    place = ", ".join(f"{name} {number}" for name, number in strategy.coordinates.items())
    times = strategy.gather_objects((place, {name: round(seconds, 3) for name, seconds in clock.total().items()}))
    clock.on_event("processes", processes=[{"place": each, "phases": phases} for each, phases in times])


def load_best(
    state: TrainerState,
    checkpointer: Checkpointer,
    strategy: Collectives,
    parts: Callable[[], dict[str, Stateful]],
    metric: str | None,
) -> bool | None:
    """Load the weights of the best step. Missing files are logged: an exception would lose the trained weights.

    Returns:
        Whether rank 0 finds the checkpoint of the best step; None if there is no best step.

    Raises:
        ValueError: the checkpoints cannot be listed.
    """
    if state.best_global_step is None:
        logger.error(
            "load_best_model_at_end=True, but no evaluation of this run gave a %r that is a number; the weights are "
            "those of step %d. Lower eval_steps or eval_delay if no evaluation was made",
            metric,
            state.global_step,
        )
        return None
    folder, is_there, problem = strategy.gather_objects(_find_best_checkpoint(state, checkpointer))[0]
    if problem:
        raise ValueError(f"load_best_model_at_end=True, but the best weights were not loaded: {problem}")
    if not is_there:
        logger.error(
            "load_best_model_at_end=True, but the checkpoint of the best step, %d, is not at %s; the weights are those "
            "of step %d. Where it was kept or pushed, it is loaded from there with from_pretrained",
            state.best_global_step,
            folder,
            state.global_step,
        )
        return False
    restore_parts(checkpointer, parts(), folder)
    logger.info("loaded the best weights: %s, metric %s", folder, state.best_metric)
    return True


def _find_best_checkpoint(state: TrainerState, checkpointer: Checkpointer) -> tuple[str, bool, str]:
    """Return the folder of the best step's checkpoint, whether it exists, and the error of a failed look-up."""
    best = cast("int", state.best_global_step)
    try:
        folder = str(checkpointer.path(best))
        if best in checkpointer.steps():
            return folder, True, ""
        # The run began in another folder, or it began on another machine and resumed from the Hub.
        folder = state.best_model_checkpoint or folder
        return folder, os.path.isdir(folder), ""
    except ValueError as error:
        return "", False, str(error)


def last_train_loss(state: TrainerState) -> float:
    """Return the mean loss that a finished run has logged; NaN if it has logged none."""
    entries = [entry["train_loss"] for entry in state.log_history if "train_loss" in entry]
    return entries[-1] if entries else math.nan


def is_run_complete(run: Run) -> bool:
    """Whether a restored run has done all its steps, and the evaluation and the log after the last one.

    A step's checkpoint is saved before its epoch ends. So a run may die in the evaluation at the end of its last
    epoch: it has done its last step, and that evaluation is still pending.
    """
    if run.window.first_step < run.plan.max_steps:
        return False
    args, state = run.methods.args, run.methods.state
    evaluates = args.eval_strategy == "epoch" and args.eval_delay <= state.epoch
    is_due = evaluates or (args.logging_strategy == "epoch" and run.window.last_logged_step < state.global_step)
    return not run.position.pending and not (_is_within_epoch(run.position) and is_due)


def run_pending(run: Run) -> None:
    """Run what is pending at the step of the checkpoint, so that the run continues as one that never stopped.

    Pending may be an evaluation that an interruption skipped, with the save after it. Pending may also be the end of an
    epoch that ends before its last sample: at the last step of the run, because a callback of that evaluation ends
    the epoch, or because a callback had asked for it. Any other epoch ends when the loop finds no sample left.
    """
    control, state, args = run.methods.control, run.methods.state, run.methods.args
    # An exception may have ended an earlier call of `train` with flags still set.
    control.should_log = control.should_evaluate = control.should_save = control.should_epoch_stop = False
    is_at_the_end = state.global_step >= state.max_steps
    is_asked_to_stop = control.should_training_stop  # in `on_train_begin`
    if run.position.pending:
        control.should_evaluate = args.eval_strategy != "no"
        control.should_save = "save" in run.position.pending and args.save_strategy != "no"
        control.should_training_stop, run.position.pending = is_at_the_end, []
        what_is_due(run)(run)
        is_asked_to_stop = control.should_training_stop
    control.should_training_stop |= is_at_the_end
    if _is_within_epoch(run.position) and (is_at_the_end or is_asked_to_stop or run.position.ends_epoch_early):
        end_epoch(run, moves_on=run.is_epoch_complete() or not control.should_training_stop)


def _is_within_epoch(position: DataPosition) -> bool:
    return position.samples > 0 and not position.is_at_epoch_end
