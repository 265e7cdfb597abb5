"""Apply arguments that changed since the checkpoint to a restored run, or refuse them.

Every changed argument is logged. A change of the data order is refused in the middle of an epoch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau

from tr_args.constraints import GroupOption, Numbers
from tr_args.schema import facts, facts_of_kind
from tr_core.checkpoint import schedule_state as schedules
from tr_core.checkpoint.optimizer_groups import GroupChange, apply_options, check_state_shapes, compare_groups
from tr_core.checkpoint.settings import LEFT_OUT, SAMPLES, DescribedRun, Difference, Settings
from tr_core.evaluation.best_metric import metric_name
from tr_core.optim.schedules import FOLLOW_METRIC
from tr_core.plan import steps_left, steps_of_epochs
from tr_log import get_logger

logger = get_logger("tr_core.trainer")


def apply_changed_arguments(
    run: DescribedRun, settings: Settings, schedule_state: dict[str, Any], saved_max_steps: int
) -> int | None:
    """Apply changed arguments to the optimizer, the schedule, the data order and the best model.

    Args:
        run: the run that was restored.
        settings: its settings, and those of the checkpoint.
        schedule_state: the schedule's state in the checkpoint.
        saved_max_steps: at which step the saved run would have ended.

    Returns:
        The steps from here to the end; None if the run ends at a number of steps.

    Raises:
        ValueError: a change prevents the run from resuming; the message names it, with both values.
    """
    if settings.saved is None:
        check_state_shapes(run.optimizer, run.methods.model)
        logger.info("the checkpoint does not say what it was trained with: schedule and groups are as saved")
        schedules.load_as_saved(run.schedule, schedule_state)
        return _steps_left(run, None, saved_max_steps)
    differences = settings.differences()
    outcomes = resolve_order(run, settings.saved, differences)
    groups = _restore_optimizer(run, settings)
    left = _steps_left(run, settings.saved, saved_max_steps)
    change = _ArgumentChanges(run, settings, {difference.name for difference in differences}, groups, left)
    change.continue_schedule(schedule_state)
    change.forget_best()
    for difference in differences:
        outcome = outcomes.get(difference.name) or change.outcome(difference)
        logger.info("%s (%s)", difference, outcome)
    for line in change.further_lines():
        logger.info("%s (applied)", line)
    return left


def _restore_optimizer(run: DescribedRun, settings: Settings) -> list[GroupChange]:
    saved = cast("dict[str, Any]", settings.saved)
    changes = compare_groups(saved["groups"], settings.groups)
    check_state_shapes(run.optimizer, run.methods.model)
    if run.methods.has_given_optimizer:
        return []
    apply_options(run.optimizer, changes)
    return changes


@dataclass
class _ArgumentChanges:
    """Find and apply what changed between a checkpoint and the run that resumes from it."""

    run: DescribedRun
    settings: Settings
    names: set[str]
    groups: Sequence[GroupChange]
    left: int | None
    place: int | None = None
    begins_anew: bool = False

    @property
    def saved(self) -> Mapping[str, Any]:
        return cast("dict[str, Any]", self.settings.saved)

    @property
    def is_own_schedule(self) -> bool:
        """Whether the user built the schedule, of a kind whose options are unknown here."""
        return self.run.methods.has_given_schedule or not schedules.is_known(self.run.schedule)

    def continue_schedule(self, state: dict[str, Any] | None) -> None:
        """Resume the schedule, by its kind."""
        schedule, rates = self.run.schedule, [change for change in self.groups if change.name == "learning_rate"]
        saved = self.saved["schedule"]
        if saved["kind"] != type(schedule).__name__:
            state = None
        self.begins_anew = state is None
        if self.is_own_schedule:
            if state is not None:
                schedules.load_as_saved(schedule, state)
            else:
                schedules.begin_at_base(self.run.optimizer, self.settings.groups)
        elif schedules.is_function(schedule):
            self.begins_anew = False
            self.place = self._place(state, rates)
            schedules.continue_function(cast("LambdaLR", schedule), state, rates, self.place)
        else:
            if state is None:
                schedules.begin_at_base(self.run.optimizer, self.settings.groups)
                rates = []
            self.begins_anew |= self._has_another_metric()
            state = None if self.begins_anew else state
            schedules.continue_following(cast("ReduceLROnPlateau", schedule), state, rates, saved["options"])

    def _place(self, state: Mapping[str, Any] | None, rates: Sequence[GroupChange]) -> int | None:
        """Return the run's step on the current schedule; None if the saved schedule equals the current one.

        If the length of a run is a number of epochs, the step is that of a run with the current arguments at this
        sample. If the length is a number of steps, it is the step that the run has reached.
        """
        saved, run, args = self.saved, self.run, self.run.methods.args
        is_same_length = (saved["steps"], saved["samples_per_step"]) == (self.settings.steps, run.plan.samples_per_step)
        if is_same_length and state is not None:
            is_same = not rates and not self.names & set(facts(type(args), Numbers.SCHEDULE))
            return None if is_same else int(state["last_epoch"])
        return self.run.methods.state.global_step if self.left is None else max(self.settings.steps - self.left, 0)

    def _has_another_metric(self) -> bool:
        """Whether the metric of the best model changed, so that earlier evaluations do not compare."""
        args, saved = self.run.methods.args, self.saved["arguments"]
        watched = [(side["metric_for_best_model"], side["greater_is_better"]) for side in (saved, args.to_dict())]
        metrics = [(None if name is None else metric_name(name), is_greater) for name, is_greater in watched]
        return None not in watched[0] and metrics[0] != metrics[1]

    def forget_best(self) -> None:
        """Reset the best model if its metric changed."""
        state = self.run.methods.state
        if self._has_another_metric():
            state.best_metric = state.best_global_step = state.best_model_checkpoint = None

    def outcome(self, difference: Difference) -> str:
        """Return in a few words what happens to a changed argument."""
        kind, is_fp16 = type(self.run.methods.args), bool(difference.current)
        special: dict[str, Callable[[], str]] = {
            **dict.fromkeys(facts(kind, Numbers.OPTIMIZER), lambda: self._of_optimizer(difference.name)),
            **dict.fromkeys(facts(kind, Numbers.SCHEDULE), self._of_schedule),
            **dict.fromkeys(facts(kind, Numbers.METRIC), self._of_metric),
            "seed": lambda: "no effect: random states are those of the checkpoint",
            "fp16": lambda: f"applied; the {'loss scale starts over' if is_fp16 else 'saved one is skipped'}",
        }
        return special.get(difference.name, lambda: "applied")()

    def _of_optimizer(self, name: str) -> str:
        if self.run.methods.has_given_optimizer:
            return f"not applied: {type(self.run.optimizer).__name__} was given, and its saved state goes on"
        if name == "learning_rate" and self.is_own_schedule:
            return f"not applied: the saved state of {type(self.run.schedule).__name__}, your own schedule, goes on"
        option = facts_of_kind(type(self.run.methods.args), GroupOption).get(name)
        has_effect = any(option is None or change.name == option.name for change in self.groups)
        return "applied" if has_effect else "no effect: no parameter group depends on it"

    def _of_schedule(self) -> str:
        name = type(self.run.schedule).__name__
        if self.is_own_schedule:
            return f"{name} starts over" if self.begins_anew else f"not applied: the saved state of {name} goes on"
        return "applied; the schedule starts over" if self.begins_anew else "applied"

    def _of_metric(self) -> str:
        if not self._has_another_metric():
            return "applied"
        follows = str(self.run.methods.args.lr_scheduler_type) in FOLLOW_METRIC
        return f"applied; the best so far is forgotten{', and the schedule starts over' if follows else ''}"

    def further_lines(self) -> list[str]:
        """Return changes that are not arguments: positions on the schedule, and groups that the user's code built."""
        lines, before, steps = [], self.saved["steps"], self.settings.steps
        if self.place is not None and before != steps:
            lines.append(f"steps of the schedule: {before} -> {steps}, of which {self.place} count as done")
        if not self.names & {"optim", *facts(type(self.run.methods.args), Numbers.OPTIMIZER)}:
            lines += [f"{c.name} of parameter group {c.group}: {c.saved} -> {c.current}" for c in self.groups]
        return lines


def _steps_left(run: DescribedRun, saved: Mapping[str, Any] | None, saved_max_steps: int) -> int | None:
    """Count the steps to the end of `num_train_epochs`; None if the run ends at a number of steps.

    With `ignore_data_skip` the epoch begins again, but the run ends after as many samples as were left for it, and at
    the end of its epochs at the latest.
    """
    args, data, position = run.methods.args, run.data, run.position
    if args.max_steps > 0:
        return None
    left, step = steps_left(args, data, position.epoch, position.samples), run.methods.state.global_step
    if left is None or not args.ignore_data_skip or (saved is not None and saved["is_between_epochs"]):
        return left
    planned = run.plan.max_steps - step
    if saved is not None and (epochs := _epochs_of(saved["arguments"])) is not None:
        samples = (saved_max_steps - step) * saved["samples_per_step"]
        longer = run.plan.max_steps - steps_of_epochs(epochs, args, data)
        planned = math.ceil(samples / run.plan.samples_per_step) + longer
    return max(min(planned, left), 0)


def _epochs_of(saved: Mapping[str, Any]) -> float | None:
    """Return the number of epochs of a saved run; None if it was to end at a number of steps."""
    return None if saved["max_steps"] > 0 else saved["num_train_epochs"]


def resolve_order(run: DescribedRun, saved: Mapping[str, Any], differences: Sequence[Difference]) -> dict[str, str]:
    """Return what happens to changed arguments that determine the data order, by their names.

    Between two epochs they are applied. An epoch that was saved as complete stays complete if the data has another
    length.

    Raises:
        ValueError: they changed in the middle of an epoch; the message names them with both values.
    """
    args = run.methods.args
    found = {change.name: change for change in differences}
    changed = {name: found[name] for name in (*facts(type(args), Numbers.ORDER), SAMPLES, LEFT_OUT) if name in found}
    if args.train_sampling_strategy != "group_by_length":
        changed.pop("length_column_name", None)
    changed.pop("data_seed", None)
    changed.pop("leave_out_samples", None)  # the samples it names count, not where it is
    seeds = [_data_seed(arguments) for arguments in (saved["arguments"], args.to_dict())]
    is_seeded = run.data.order_state().get("strategy", "sequential") != "sequential"  # iterable data has its own order
    if is_seeded and seeds[0] != seeds[1]:  # either of the two arguments may set it
        name = "data_seed" if "data_seed" in found else "seed"
        changed[name] = found[name]
    if saved["is_between_epochs"]:
        if SAMPLES in changed and run.position.samples:
            run.position.samples = run.data.num_samples or run.position.samples
        return dict.fromkeys(changed, "applied from the next epoch on")
    if args.ignore_data_skip:
        return dict.fromkeys(changed, "applied: the epoch restarts")
    if changed:
        raise ValueError(
            f"the checkpoint is {run.position.samples} samples into an epoch, whose order changes with "
            f"{'; '.join(map(str, changed.values()))}. Resuming would repeat samples and leave others out: use "
            "the saved value, a checkpoint between two epochs, or ignore_data_skip=True, which restarts the epoch"
        )
    return {}


def _data_seed(arguments: Mapping[str, Any]) -> Any:
    seed = arguments.get("data_seed")
    return arguments.get("seed") if seed is None else seed
