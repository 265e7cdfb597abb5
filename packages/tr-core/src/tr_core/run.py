"""Hold what one call of `train` uses: plan, data and position, optimizer, and everything since the last log."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch.optim.lr_scheduler import LRScheduler

from tr_core.capture.conditions import refused, why_not_captured
from tr_core.capture.steps import StepCapture
from tr_core.changes import ChangeWatch, check_same_on_all_ranks, values_of_all_ranks
from tr_core.checkpoint.log_files import LogFiles
from tr_core.checkpoint.settings import Settings
from tr_core.data.batches import Batches, TakeBatches
from tr_core.data.position import DataPosition, derive_position
from tr_core.data.sampler import MicroBatch
from tr_core.data.virtual_shards import VirtualShards
from tr_core.flops import has_targets
from tr_core.log_window import ClosedWindow, LogWindow, RankWindow, build_token_counter, store_counts, warn_of_nonfinite
from tr_core.model import TrainingMode
from tr_core.model_io import forward_parameters, main_input_name
from tr_core.optim.fused_backward import kind
from tr_core.optim.nonfinite import choose_guard
from tr_core.optim.schedules import follows_metric
from tr_core.optim.updates import Updates
from tr_core.plan import TrainingPlan
from tr_core.preemption.preemption import Preemption
from tr_core.protocols import Strategy
from tr_core.random_state import generator_kinds
from tr_core.state import TrainerState, resolve_steps
from tr_core.trainer_methods import TrainerMethods
from tr_log.phases import EXCHANGE, phase


@dataclass
class Run:
    """Hold the parts and the progress of one call of `train`.

    Attributes:
        strategy: applies updates, and exchanges values between ranks.
        watch: the last recorded values of what a user may change during the run.
        updates: clips and applies gradients.
        shards: those of a step that this rank computes, with `elastic`.
        capture: captures and replays steps; None with `step_compile="off"`.
        count_targets: counts the targets of a step; None where nothing needs the count.
        take_batches: takes the batches of a step by an override; None without one.
        after_step: runs what is due after a step by an override; None without one.
        follows_metric: whether an evaluation steps the schedule, with its metric.
        ignore_keys: outputs of the model that evaluations skip.
        found_size: samples of a micro-batch on a device that `auto_find_batch_size` found to fit; None without one.
        recovery: goes back before steps that spoil the run, with `on_spike`.
        restored_recovery: its state in the checkpoint that was restored.
        goes_on: whether it goes on from a snapshot, as a leg after others.
        legs: what ends and begins where processes come and go; None elsewhere.
        has_saved: whether this call began to save a checkpoint.
        counts_operations: whether the operations of the next micro-batch are to be counted.
    """

    methods: TrainerMethods
    plan: TrainingPlan
    data: Batches
    strategy: Strategy
    optimizer: torch.optim.Optimizer
    schedule: LRScheduler
    window: LogWindow
    mode: TrainingMode
    watch: ChangeWatch
    updates: Updates
    preemption: Preemption = field(init=False)
    settings: Settings = field(init=False)
    capture: StepCapture | None = None
    position: DataPosition = field(default_factory=DataPosition)
    log_files: LogFiles = field(default_factory=LogFiles)
    count_targets: Callable[[list[MicroBatch]], torch.Tensor | None] | None = None
    shards: VirtualShards | None = None
    take_batches: TakeBatches | None = None
    after_step: Callable[[Run], None] | None = None
    follows_metric: bool = False
    ignore_keys: list[str] | None = None
    found_size: int | None = None
    recovery: Any = None
    restored_recovery: Any = None
    goes_on: bool = False
    legs: Any = None
    has_saved: bool = False
    counts_operations: bool = False

    @classmethod
    def begin(
        cls,
        methods: TrainerMethods,
        strategy: Strategy,
        plan: TrainingPlan,
        data: Batches,
        optimizer: torch.optim.Optimizer,
        schedule: LRScheduler,
    ) -> Run:
        """Return a run at the first sample."""
        args, model, wrapped = methods.args, methods.model, methods.model_wrapped
        tokens = build_token_counter(args.include_num_input_tokens_seen, model, methods.processing_class)
        shards = VirtualShards.of(args, strategy.data)
        own = (
            []
            if shards is None
            else [
                f"{name}.{key}".lstrip(".")
                for name, module in model.named_modules()
                for key, value in vars(module).items()
                if isinstance(value, generator_kinds())
            ]
        )
        if own:
            raise ValueError(
                f"elastic draws random numbers by shard, and {', '.join(own)} of the model is a generator of its own; "
                "draw from torch's, which is seeded for each micro-batch"
            )
        share = None if shards is None else strategy.data.world_size / shards.number
        window = LogWindow(strategy.data, tokens, share=share)
        guard = choose_guard(str(args.on_nonfinite), strategy, window, optimizer, wrapped)
        updates = Updates(strategy, optimizer, guard)
        # A strategy that shards parameters, or wraps the optimizer in an engine, clears gradients itself.
        clears = strategy.forward_is_collective or strategy.binds_optimizer
        watch = ChangeWatch(args, model, optimizer, clears_gradients=clears)
        mode = TrainingMode(model, wrapped)
        methods.loss_rule.forget()
        run = cls(methods, plan, data, strategy, optimizer, schedule, window, mode, watch, updates)
        run.shards = shards
        if args.step_compile != "off":
            run.capture_steps()
        run.take_settings()
        run.settings = Settings(run)
        window.clock.exchanged_s, window.of_strategy = run.exchange_s, strategy.window_metrics
        return run

    def take_settings(self) -> None:
        """Read the current values of what may change during a run."""
        methods, args, window, rule = self.methods, self.methods.args, self.window, self.methods.loss_rule
        self.count_targets = rule.count if rule.counts else None
        self.take_batches, self.after_step = methods.taking(), methods.after_step()
        self.follows_metric = follows_metric(self.schedule)
        self.plan = replace(self.plan, max_grad_norm=args.max_grad_norm or None)
        window.filters_nonfinite = args.logging_nan_inf_filter
        window.counters = [] if window.tokens is None else [window.tokens.count]
        window.throughput.forget_model()
        name = main_input_name(methods.model)
        if name != "input_ids" or name in forward_parameters(methods.model):
            window.counters.append(window.throughput.counter(name, with_targets=has_targets(methods.model)))
        if methods.counts_floating_point_ops():
            window.counters.append(lambda batch: window.count_flops(methods.floating_point_ops(batch.inputs)))
        self.watch.note(args, methods.model, self.optimizer)

    def apply_changes(self) -> None:
        """Apply the changes since the last step, or refuse them."""
        methods, args, state = self.methods, self.methods.args, self.methods.state
        self.check_length()
        changed = self.watch.changed_arguments(args)
        methods.prepare()
        for name in ("logging_steps", "eval_steps", "save_steps"):
            if name in changed:
                setattr(state, name, resolve_steps(getattr(args, name), state.max_steps))
        self.schedule = cast("LRScheduler", methods.lr_scheduler)
        if self.watch.has_other_parameters(methods.model):
            self.watch.check_new_parameters(methods.model, self.optimizer)
            self.updates.check()
            self.updates.guard = self.recovery or choose_guard(
                str(args.on_nonfinite), self.strategy, self.window, self.optimizer, methods.model_wrapped
            )
            if self.recovery is not None:
                self.recovery.snapshot.take(self)  # one of before has no place for the new parameters
        self.take_settings()
        if self.capture is not None:
            self.capture.settle(self._why_not_captured())
        self.settings.record_changes()
        methods.has_assignments = False
        if "max_grad_norm" in changed and kind(self.optimizer) == "backward-update":
            cast("Any", self.optimizer).clip_to(self.plan.max_grad_norm)

    def capture_steps(self) -> None:
        """Capture steps, and replay them where they fit."""
        methods = self.methods

        def max_norm() -> float | None:
            return self.plan.max_grad_norm

        why_not = self._why_not_captured()
        if why_not is not None and methods.args.step_compile == "graph":
            raise ValueError(refused(why_not))
        self.capture = StepCapture(methods, self.strategy, self.optimizer, self.updates, max_norm, why_not)

    def _why_not_captured(self) -> str | None:
        methods = self.methods
        return why_not_captured(methods.args, self.strategy, methods.model, methods.overrides, self.optimizer)

    def check_length(self) -> None:
        """Raise if a callback made the run longer: epochs and schedule were planned for its first length."""
        max_steps = self.methods.state.max_steps
        if max_steps > self.plan.max_steps:
            raise ValueError(
                f"state.max_steps was raised from {self.plan.max_steps} to {max_steps} during training, but the "
                "schedule and the number of epochs were planned for the former; set args.max_steps before train(), or "
                "resume the run with a larger one"
            )

    def exchange_s(self) -> float | None:
        """Return the seconds since the last call that steps waited for gradients of other ranks; None if unknown."""
        return self.strategy.exchange_s(self.methods.model_wrapped)

    def use_strategy(self, strategy: Strategy) -> None:
        """Replace the strategy for the rest of the run."""
        self.strategy = self.updates.strategy = strategy

    def settle(self) -> None:
        """Wait for what the steps left queued on the device, so that its time counts as theirs. Sync."""
        if self.strategy.device.type in ("cuda", "xpu", "mps"):
            torch.accelerator.synchronize()

    def fire(self, event: str, **extra: Any) -> None:
        """Send an event to the callbacks that define it."""
        self.methods.callback_handler.fire(event, **extra)

    # Epochs

    def begin_epoch(self) -> None:
        """Run what is due at the beginning of an epoch, or when a resumed run enters it."""
        if not self.position.is_retry:
            self.fire("on_epoch_begin")
        self.position.is_retry = self.position.is_at_epoch_end = False
        self.counts_operations = self.methods.args.count_flops and not self.window.throughput.has_counted
        self.mode.record()
        self.apply_changes()

    def has_epoch_left(self) -> bool:
        """Whether another epoch begins. `max_steps` alone ends a run that it was given for, however long its epochs."""
        if self.plan.ends_by_steps:
            return self.methods.state.global_step < self.methods.state.max_steps
        return self.position.epoch < self.plan.num_epochs

    def is_epoch_complete(self) -> bool:
        """Whether the epoch of `position` has no batch left; False if its length is unknown."""
        return self.position.samples > 0 and self.data.remaining(self.position.samples) == 0

    # Logs

    @contextmanager
    def counting(self, inputs: Any) -> Iterator[None]:
        """Count the operations of a micro-batch in the block, outside the rates, if they are to be counted."""
        if not self.counts_operations:
            yield
            return
        with self.window.throughput.counting(inputs, self.methods.scope, self.strategy.device):
            yield
        self.counts_operations = False

    def log_window(self) -> None:
        """Log the mean loss of the steps since the last log, the last gradient norm and learning rate, and metrics."""
        methods, window = self.methods, self.window
        step = methods.state.global_step
        steps = step - window.last_logged_step
        closed = self.close_window()
        window.last_logged_step = step
        logs = window.entry(closed, steps, methods.state.num_input_tokens_seen)
        if self.strategy.rank == 0:
            warn_of_nonfinite(closed, steps, step, str(methods.args.on_nonfinite))
        methods.log(logs)
        if self.strategy.world_size > 1:
            self.preemption.agree_on_flags()

    def close_window(self) -> ClosedWindow:
        """Read the window of all ranks and begin a new one. Collective. Sync: once a log.

        Raises:
            FloatingPointError: a loss or gradient was not finite, and `on_nonfinite` is `raise`.
            ValueError: a value that must be the same on all ranks was changed on some of them.
        """
        self.updates.check()
        args, state, window = self.methods.args, self.methods.state, self.window
        shared = values_of_all_ranks(args, self.optimizer) if self.strategy.world_size > 1 else {}
        read = self._read_window()
        dtype = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else None
        together = self.strategy.world_size // self.strategy.data.world_size
        model, whole = self.methods.model, self.methods.whole
        share = window.throughput.share(model, self.strategy.device, dtype, args.peak_flops, together, whole)
        with phase(EXCHANGE):
            gathered = self.strategy.data.gather_objects((read, shared, share))
        check_same_on_all_ranks([values for _, values, _ in gathered])
        windows = [of_rank for of_rank, _, _ in gathered]
        store_counts(state, windows)
        tokens = None if window.tokens is None else state.num_input_tokens_seen
        window.throughput.close([given for _, _, given in gathered], tokens)
        return window.close(windows)

    def _read_window(self) -> RankWindow:
        """Return this rank's window, with the metrics of those that computed its samples' losses. Collective. Sync."""
        own, strategy = self.window.read(), self.strategy
        if strategy.schedules_micro_batches:
            everyone, merged = strategy.gather_objects((strategy.data.rank, own["metrics"])), dict[str, Any]()
            for rank, metrics in everyone:
                merged = {**metrics, **merged} if rank == strategy.data.rank else merged
            own["metrics"] = merged
        return own

    def store_tokens(self) -> None:
        """Add the input tokens of all ranks to the state, if they are counted, for an entry between two logs."""
        if self.window.tokens is not None:
            tokens = self.strategy.data.gather_objects(self.window.tokens.take())
            self.methods.state.num_input_tokens_seen += sum(tokens)

    # Interruptions

    def writes_in_background(self) -> bool:
        """Whether a checkpoint may still be written in the background."""
        args = self.methods.args
        return args.save_async and (args.save_strategy != "no" or self.has_saved)

    # Checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the data and the open log windows of all ranks; see `collect_window`."""
        position, window = self.position, self.window
        return {
            "epoch": position.epoch,
            "samples": position.samples,
            "order": self.data.order_state(),
            "last_logged_step": window.last_logged_step,
            "learning_rate": float(window.learning_rate),
            "window": window.of_all_ranks,
            "pending": position.pending,
            "is_at_epoch_end": position.is_at_epoch_end,
            "ends_epoch_early": position.ends_epoch_early,
            "is_epoch_complete": self.is_epoch_complete(),
            "found_size": self.found_size,
            "recovery": None if self.recovery is None else self.recovery.state_dict(),
        }

    def load_state_dict(self, state_dict: dict[str, Any], /, *, skips_data: bool | None = None) -> None:
        """Restore the position in the data and the log window. Another number of ranks shares the window evenly.

        `skips_data` is whether the samples before the position are left out; None for what the arguments say.
        """
        position, ranks = self.position, self.strategy.data
        skips_data = not self.methods.args.ignore_data_skip if skips_data is None else skips_data
        if "foreign" in state_dict:
            saved = state_dict["foreign"]
            position.epoch, samples = derive_position(saved, self.data, self.plan.samples_per_step)
            position.samples = samples if skips_data else 0
            position.is_at_epoch_end = True  # its files say that its run ended there
            self.window.last_logged_step = saved["global_step"]
            return
        begins_again = not skips_data and not state_dict.get("is_epoch_complete", False)
        position.epoch, position.samples = state_dict["epoch"], 0 if begins_again else state_dict["samples"]
        self.data.restore_order(state_dict["order"], position.samples)
        self.window.last_logged_step = state_dict["last_logged_step"]
        # For the log at the end of an epoch, if the checkpoint is that of its last step.
        self.window.learning_rate = state_dict["learning_rate"]
        position.pending = list(state_dict["pending"])
        position.is_at_epoch_end = state_dict["is_at_epoch_end"]
        position.ends_epoch_early = state_dict["ends_epoch_early"]
        self.found_size, self.restored_recovery = state_dict.get("found_size"), state_dict.get("recovery")
        if self.recovery is not None:
            self.recovery.load_state_dict(self.restored_recovery)
        windows = state_dict["window"]
        places = [window["place"] for window in windows]
        self.data.restore_source(places, ranks.rank, ranks.world_size, in_epoch=position.samples > 0)
        self.window.load(windows, ranks.rank, ranks.world_size)

    def collect_window(self, state: TrainerState) -> None:
        """Read the log windows of all ranks for a save, so that the next log after a resume stays the same. Collective.

        It adds operations and tokens to the state, where a checkpoint saves them.
        """
        own = self._read_window()  # sync: once a save
        own["place"] = self.data.source_state()
        windows = self.strategy.data.gather_objects(own)
        store_counts(state, windows)
        for window in windows:
            window["flops"], window["tokens"] = 0.0, 0
        self.window.of_all_ranks = windows
