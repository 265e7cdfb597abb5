"""Hold the state of one call of `train`: plan, data and position, optimizer, and everything since the last log."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from tr_args import TrainingArguments
from tr_core.data.batches import Batches
from tr_core.data.position import DataPosition, derive_position
from tr_core.data.sampler import MicroBatch
from tr_core.log_window import (
    RankWindow,
    TokenCounter,
    build_token_counter,
    read_rank_window,
    share_window,
    store_counts,
)
from tr_core.metric_means import MetricWindow
from tr_core.model import TrainingMode
from tr_core.optim.nonfinite import UpdateGuard, build_guard, is_nonfinite
from tr_core.plan import TrainingPlan, syncs_each_batch
from tr_core.protocols import Strategy
from tr_core.state import TrainerState

if TYPE_CHECKING:
    from tr_core.checkpoint.settings import Settings
    from tr_core.preemption.preemption import Preemption
    from tr_core.trainer.trainer import Trainer

# Steps whose loss and norm are looked at together: one by one that costs a step four operations on scalars.
CHECK_EVERY = 64


@dataclass
class Run:
    """One call of `train`.

    Attributes:
        plan: how long the run is.
        data: passes over the training data.
        strategy: how updates are applied, and how ranks exchange what they hold.
        optimizer: what applies the gradients.
        schedule: what sets the learning rate.
        loss_sum: sum of the losses of this rank's steps since the last log, a scalar tensor on the device.
        loss_before_step: the same without the step that is being made.
        position: where in the data the run is.
        count_items: what counts the targets of a step, None where nothing needs the count.
        max_grad_norm: norm that gradients are clipped to; None for no clipping.
        schedule_follows_metric: whether the schedule is stepped with an evaluation's result, not after every step.
        step_schedule: what is called after every step that was applied.
        counters: what is called with every micro-batch: floating-point operations and tokens, where they are counted.
        tokens: what counts input tokens, None where nobody asked.
        syncs_each_batch: whether gradients are exchanged after every micro-batch, not after a step's last one only.
        settings: what the run is trained with, as its checkpoints remember it.
        begins_pass_anew: whether a restored place in a pass is its beginning.
        hides_nan: whether losses that are not finite are left out of the log.
        update_strategy: what clips and applies gradients: the strategy, or a guard before it where not all are applied.
        guard: that guard, None where every update is applied.
        grad_norm: norm of the last step's gradients before clipping, on the device.
        learning_rate: learning rate of the first parameter group in the last step.
        flops: floating-point operations since they were last added to the state.
        first_step: completed steps of the run when this call began.
        first_tokens: input tokens seen when this call began.
        last_logged_step: step of the last log.
        logged_loss: sum over the steps of this call of the losses already logged.
        logged_skips: updates of this call that were left out, of the windows already logged.
        start_s: `time.perf_counter()` at the beginning.
        ignore_keys: outputs of the model that evaluations leave out.
        window: what every rank holds since the last log, as it is to be saved.
        metrics: what was logged with `log_metric` since the last log.
        unjudged: loss and gradient norm of the last applied steps, which `num_nonfinite` does not count yet.
        num_nonfinite: steps since the last log whose loss or norm was not finite, on the device.
        num_skipped: updates since the last log that were left out for it, on the device.
        mode: which of the model's modules train.
        parameters: all parameters of the model, as they were when it was last looked at.
        outside: those of them that the optimizer does not hold, by name.
        leaves_out_by_choice: whether some of those were trainable when the run began, and so are not to be updated.
        arguments: the values of all arguments when they were last looked at.
        seen: assignments to the arguments up to then, False, and the optimizer's groups then: what the loop compares.
        zero: the scalar that a step's loss begins with, on the device.
        interruption: what ends the run after a signal, None where nothing does.
        has_saved: whether this call began to save a checkpoint.
    """

    plan: TrainingPlan
    data: Batches
    strategy: Strategy
    optimizer: torch.optim.Optimizer
    schedule: LRScheduler
    loss_sum: torch.Tensor
    mode: TrainingMode
    position: DataPosition = field(default_factory=DataPosition)
    count_items: Any = None
    max_grad_norm: float | None = None
    schedule_follows_metric: bool = False
    step_schedule: Callable[[], Any] = lambda: None
    counters: list[Callable[[MicroBatch], None]] = field(default_factory=list)
    tokens: TokenCounter | None = None
    syncs_each_batch: bool = False
    settings: Settings | None = None
    begins_pass_anew: bool = False
    hides_nan: bool = False
    update_strategy: Strategy | UpdateGuard = field(init=False)
    guard: UpdateGuard | None = None
    grad_norm: torch.Tensor | None = None
    learning_rate: float = 0.0
    flops: float = 0.0
    first_step: int = 0
    first_tokens: int = 0
    last_logged_step: int = 0
    logged_loss: float = 0.0
    logged_skips: int = 0
    start_s: float = field(default_factory=time.perf_counter)
    ignore_keys: list[str] | None = None
    window: list[RankWindow] = field(default_factory=list)
    metrics: MetricWindow = field(init=False)
    unjudged: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    num_nonfinite: torch.Tensor = field(init=False)
    num_skipped: torch.Tensor = field(init=False)
    zero: torch.Tensor = field(init=False)
    loss_before_step: torch.Tensor = field(init=False)
    interruption: Preemption | None = None
    has_saved: bool = False
    parameters: list[torch.Tensor] = field(default_factory=list)
    outside: dict[str, torch.Tensor] = field(default_factory=dict)
    leaves_out_by_choice: bool = True
    arguments: dict[str, Any] = field(default_factory=dict)
    seen: tuple[int, bool, int] = (0, False, 0)

    def __post_init__(self) -> None:
        self.metrics = MetricWindow(self.strategy)
        self.num_nonfinite = torch.zeros_like(self.loss_sum, dtype=torch.int64)
        self.num_skipped = torch.zeros_like(self.num_nonfinite)
        self.zero = self.loss_before_step = torch.zeros_like(self.loss_sum)
        self.update_strategy = self.strategy

    def configure(self, trainer: Trainer) -> None:
        """Take from a Trainer and its arguments what a run takes when it begins, and what every step needs to know."""
        args = trainer.args
        self.syncs_each_batch = syncs_each_batch(args)
        self.begins_pass_anew = args.ignore_data_skip
        self.guard = build_guard(trainer, self)
        self.tokens = build_token_counter(trainer)
        self.take_settings(trainer)
        self.leaves_out_by_choice = any(p.requires_grad for p in self.outside.values())

    def take_settings(self, trainer: Trainer) -> None:
        """Take what may change during a run as it is now."""
        args = trainer.args
        self.count_items = trainer.loss_rule.count if trainer.loss_rule.counts else None
        self.max_grad_norm = args.max_grad_norm or None
        self.schedule_follows_metric = isinstance(self.schedule, ReduceLROnPlateau)
        self.step_schedule = (lambda: None) if self.schedule_follows_metric else self.schedule.step
        self.hides_nan = args.logging_nan_inf_filter
        self.update_strategy = self.guard or self.strategy
        self.counters = [] if self.tokens is None else [self.tokens.count]
        if trainer.counts_floating_point_ops():
            self.counters.append(lambda batch: self._count_flops(trainer.floating_point_ops(batch.inputs)))
        self.note_arguments(args)
        self._take_parameters(trainer)

    def note_arguments(self, args: Any) -> None:
        """Take the arguments to be as they are: what the loop itself changed is no change of a user's."""
        self.arguments = argument_values(args)
        self.seen = (args.num_assignments, False, len(self.optimizer.param_groups))

    def _take_parameters(self, trainer: Trainer) -> None:
        self.parameters = list(trainer.model.parameters())
        # A strategy that divides parameters, or makes an engine of the optimizer, clears gradients itself.
        divides = self.strategy.forwards_together or hasattr(self.strategy, "bind_optimizer")
        held = {id(parameter) for group in self.optimizer.param_groups for parameter in group["params"]}
        named = {} if divides else dict(trainer.model.named_parameters())
        self.outside = {name: parameter for name, parameter in named.items() if id(parameter) not in held}

    def clear_outside(self) -> None:
        """Clear the gradients of parameters that no optimizer holds: they would add up from step to step.

        Raises:
            ValueError: a parameter was unfrozen which the optimizer, that had all trainable ones, does not hold.
        """
        for name, parameter in self.outside.items():
            if parameter.grad is not None:
                if not self.leaves_out_by_choice:
                    raise ValueError(_unfrozen(name))
                parameter.grad = None

    def is_pass_complete(self) -> bool:
        """Whether the pass that `position` is in has no batch left; False where that cannot be known."""
        return self.position.samples > 0 and self.data.remaining(self.position.samples) == 0

    def evaluating(self) -> AbstractContextManager[None]:
        """Surround an evaluation, which a signal may cut short."""
        return nullcontext() if self.interruption is None else self.interruption.evaluating()

    def agree_on_flags(self) -> None:
        """Have all ranks do what the callbacks of any ask for, at a place to which all come together."""
        if self.interruption is not None and self.strategy.world_size > 1:
            self.interruption.agree_on_flags()

    def writes_in_background(self, args: TrainingArguments) -> bool:
        """Whether a checkpoint may be on its way to the disk."""
        return args.save_async and (args.save_strategy != "no" or self.has_saved)

    def settle(self) -> None:
        """Wait, after the last step, for what is being written in the background."""
        if self.interruption is not None:
            self.interruption.settle()

    def settle_after(self, error: BaseException) -> None:
        """Wait, after an exception, for what this rank is writing in the background."""
        if self.interruption is not None:
            self.interruption.settle_after(error)

    def finite(self, loss: torch.Tensor, loss_sum: torch.Tensor, step: int) -> torch.Tensor:
        """Return a loss for the log: in place of one that is not finite, the mean of the window so far.

        Nothing is read from the device.

        Args:
            loss: scalar, a micro-batch's share of its step's loss.
            loss_sum: sum of the window's losses before it.
            step: completed steps.
        """
        return torch.where(torch.isfinite(loss), loss, loss_sum / (1 + step - self.last_logged_step))

    def count_nonfinite(self) -> None:
        """Count the steps in `unjudged` whose loss or norm is not finite, and empty it; nothing is read."""
        if self.unjudged:
            losses, norms = zip(*self.unjudged, strict=True)
            self.num_nonfinite += is_nonfinite(torch.stack(losses), torch.stack(norms)).sum()
            self.unjudged = []

    def mean_loss(self, steps: int) -> float:
        """Return the mean loss of this call's steps that were applied and logged, of `steps` in all."""
        applied = steps - self.logged_skips
        return self.logged_loss / applied if applied else math.nan

    def begin_window(self, logged_loss: float = 0.0, logged_skips: int = 0) -> None:
        """Begin a new log window, after one with this sum of losses and so many updates left out."""
        self.logged_loss += logged_loss
        self.logged_skips += logged_skips
        # Not subtracted from themselves: NaN - NaN stays NaN for ever.
        self.loss_sum = torch.zeros_like(self.loss_sum)
        self.num_nonfinite = torch.zeros_like(self.num_nonfinite)
        self.num_skipped = torch.zeros_like(self.num_skipped)
        self.metrics.clear()

    def state_dict(self) -> dict[str, Any]:
        """Return the place in the data and the open log window, that of every rank; see `collect_window`."""
        return {
            "epoch": self.position.epoch,
            "samples": self.position.samples,
            "order": self.data.order_state(),
            "last_logged_step": self.last_logged_step,
            "learning_rate": self.learning_rate,
            "window": self.window,
            "owed": self.position.pending,
            "is_at_epoch_end": self.position.is_at_epoch_end,
            "ends_epoch_early": self.position.ends_epoch_early,
        }

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Take over the place in the data and the log window; another number of ranks shares the window evenly."""
        if "foreign" in state_dict:
            self._begin_after(state_dict["foreign"])
            return
        position = self.position
        position.epoch, position.samples = state_dict["epoch"], 0 if self.begins_pass_anew else state_dict["samples"]
        self.data.restore_order(state_dict["order"], self.position.samples)
        self.last_logged_step = state_dict["last_logged_step"]
        # For the log at the end of an epoch, if the checkpoint is of its last step.
        self.learning_rate = state_dict["learning_rate"]
        position.pending = list(state_dict["owed"])
        position.is_at_epoch_end = state_dict["is_at_epoch_end"]
        position.ends_epoch_early = state_dict["ends_epoch_early"]
        windows = state_dict["window"]
        places = [window["place"] for window in windows]
        strategy, in_epoch = self.strategy, self.position.samples > 0
        self.data.restore_place(places, strategy.rank, strategy.world_size, in_epoch=in_epoch)
        own = share_window(windows, self.strategy.rank, self.strategy.world_size)
        norm = own["grad_norm"]
        self.grad_norm = None if norm is None else torch.full_like(self.loss_sum, norm)
        self.loss_sum = torch.full_like(self.loss_sum, own["loss"])
        self.num_nonfinite = torch.full_like(self.num_nonfinite, own["nonfinite"])
        self.num_skipped = torch.full_like(self.num_skipped, own["skipped"])
        self.metrics.load(own["metrics"])
        # What an earlier call trained belongs to the next log, but not to the mean loss of this call.
        self.logged_loss = -sum(window["loss"] for window in windows) / len(windows)
        self.logged_skips = -own["skipped"]

    def _begin_after(self, saved: dict[str, Any]) -> None:
        """Go on from where a run of another program was, with a new log window."""
        passes, samples = derive_position(saved, self.data, self.plan.per_step)
        position = self.position
        position.is_at_epoch_end = True  # its run ended there, as far as its files tell
        position.epoch, position.samples = passes, 0 if self.begins_pass_anew else samples
        self.last_logged_step = saved["global_step"]

    def collect_window(self, state: TrainerState) -> None:
        """Read the log window of all ranks, to be saved: a log after a resume is then what it would have been.

        Operations and tokens are added to the state, where a checkpoint has them.
        """
        own = read_rank_window(self)  # sync: once a save
        own["place"] = self.data.place_state()
        windows = self.strategy.gather_objects(own)
        store_counts(state, windows)
        for window in windows:
            window["flops"], window["tokens"] = 0.0, 0
        self.window = windows

    def _count_flops(self, operations: float) -> None:
        self.flops += operations


def argument_values(args: Any) -> dict[str, Any]:
    """Return the arguments by name."""
    return {field.name: getattr(args, field.name) for field in fields(args) if field.init}


def _unfrozen(name: str) -> str:
    return (
        f"the parameter {name} was unfrozen during training: it has a gradient, but is in no "
        "group of the optimizer, which holds those that were trainable when training began, and would never be "
        "updated. Add it with optimizer.add_param_group, or begin with it trainable and freeze it in on_train_begin"
    )
