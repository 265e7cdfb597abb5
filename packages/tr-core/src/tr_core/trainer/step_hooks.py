"""Hooks around a step that subclasses written for transformers override: its batches, its count, and what follows it.

A run calls them only if they are overridden: without that it takes its batches one by one, and runs what is due
directly.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, cast

import torch
from torch import nn

from tr_core.data.batches import AskedBatches, TakeBatches
from tr_core.data.sampler import MicroBatch
from tr_core.evaluation.best_metric import record_best
from tr_core.log_window import store_counts
from tr_core.loop import evaluate_and_report, log_evaluate_save
from tr_core.loss import LossRule
from tr_core.run import Run
from tr_core.trainer.hooks import Hooks

_BATCHES, _COUNT, _AFTER = "get_batch_samples", "_get_num_items_in_batch", "_maybe_log_save_evaluate"


class StepHooks(Hooks):
    """Give a step its batches and its count, and run what is due after it."""

    current_run: Run | None = None
    _asked: AskedBatches | None = None  # the batches of the step whose count is asked for
    _has_run_due = False
    loss_rule: LossRule

    # Batches

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], torch.Tensor | None]:
        """Take the batches of a step, and count their targets.

        Args:
            epoch_iterator: the batches of this rank, on the device.
            num_batches: how many to take.
            device: where the count is.
        """
        batches = list(islice(epoch_iterator, num_batches))
        return batches, self._get_num_items_in_batch(batches, device)

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> torch.Tensor | None:
        """Count the targets of a step over all ranks, those of this rank in an evaluation; None if nothing counts."""
        if not self.loss_rule.counts:
            return None
        taken = [] if self._asked is None or self.is_in_evaluation else self._asked.taken
        if len(taken) == len(batch_samples):  # a filler sample belongs to another rank, which counts it
            batch_samples = [inputs for inputs, batch in zip(batch_samples, taken, strict=True) if batch.weight > 0]
        return self.loss_rule.count_all(batch_samples, over_ranks=not self.is_in_evaluation)

    def taking(self) -> TakeBatches | None:
        """Return what takes the batches of a step by an override; None if there is none."""
        return self._take if self.overrides(_BATCHES, _COUNT) else None

    def _take(self, batches: AskedBatches, size: int) -> tuple[list[MicroBatch], torch.Tensor | None]:
        batches.begin_step(size)
        device = self.strategy.device
        self._set("_asked", batches)
        try:
            inputs, count = self.get_batch_samples(batches, size, device)
        finally:
            self._set("_asked", None)
        return batches.returned(inputs), None if count is None else torch.as_tensor(count, device=device).reshape(())

    # After a step

    def after_step(self) -> Callable[[Any], None] | None:
        """Return what runs what is due after a step by an override; None if there is none."""
        return self._run_due if self.overrides(_AFTER) else None

    def _run_due(self, _: object) -> None:
        """Call the override. It may change the sum of losses in place, and may run what is due itself.

        A checkpoint that it saves holds the sum as the override left it.
        """
        run = self._run_that_calls(_AFTER)
        control, window, position = self.control, run.window, run.position
        if control.should_log or control.should_evaluate or control.should_save:
            run.check_updates()
        loss, began_s = window.loss_sum.clone(), time.time() - (time.perf_counter() - window.start_s)
        window.loss_sum, unchanged = loss, loss._version  # changed in place: a tensor that no one else has
        ended = position.is_at_epoch_end and position.samples == 0  # the position is in the next epoch then
        self._set("_has_run_due", False)
        with self.saving(run):
            self._maybe_log_save_evaluate(
                loss,
                window.grad_norm,
                self.model_wrapped,
                self.trial,
                position.epoch - ended,
                run.ignore_keys,
                began_s,
                learning_rate=float(window.learning_rate),
            )
        if loss._version != unchanged:
            window.loss_sum = loss
        control = self.control  # it may have been replaced
        is_last = run.is_epoch_complete() or control.should_epoch_stop or control.should_training_stop
        if not self._has_run_due and (position.is_at_epoch_end or not is_last):
            # What it left undone is due again at the end of the epoch, but not after the next step.
            control.should_log = control.should_evaluate = control.should_save = False

    def _maybe_log_save_evaluate(  # noqa: PLR0917  the order of transformers
        self,
        tr_loss: torch.Tensor,
        grad_norm: torch.Tensor | float | None,
        model: nn.Module,
        trial: Any,
        epoch: float,
        ignore_keys_for_eval: list[str] | None,
        start_time: float,
        learning_rate: float | None = None,
    ) -> None:
        """Log, evaluate and save, where they are due; called by the run after each step.

        Raises:
            RuntimeError: no run is calling.
        """
        run = self._run_that_calls(_AFTER)
        window, ignore_keys = run.window, run.ignore_keys
        step = window.last_logged_step
        if self.control.should_log and self.state.global_step > step:  # what is passed on is for this log alone
            window.loss_sum = tr_loss
            if grad_norm is not None:
                window.grad_norm = torch.as_tensor(grad_norm, device=tr_loss.device)
            if learning_rate is not None:
                window.learning_rate = learning_rate
        run.ignore_keys = ignore_keys_for_eval
        self._set("_has_run_due", True)
        try:
            log_evaluate_save(run)
        finally:
            run.ignore_keys = ignore_keys
        if window.last_logged_step != step:
            tr_loss.zero_()

    def _evaluate(
        self, trial: Any, ignore_keys_for_eval: list[str] | None, skip_scheduler: bool = False
    ) -> dict[str, float]:
        """Evaluate for the run, report to a search, and step a schedule that follows a metric.

        Raises:
            RuntimeError: no run is calling.
        """
        return evaluate_and_report(self._run_that_calls("_evaluate"), ignore_keys_for_eval, steps=not skip_scheduler)

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any = None) -> bool:
        """Record the metric that chooses the best model, and return whether this evaluation is the best so far."""
        return record_best(self.args, self.state, metrics)

    def store_flos(self) -> None:
        """Add the floating-point operations and tokens since the last log to the state. Collective."""
        if (run := self.current_run) is not None:
            window = run.window
            own: Any = {"flops": window.flops, "tokens": 0 if window.tokens is None else window.tokens.take()}
            window.flops = 0.0
            store_counts(self.state, self.strategy.gather_objects(own))

    def _get_learning_rate(self) -> float:
        """Return the learning rate of the first parameter group."""
        return float(cast("torch.optim.Optimizer", self.optimizer).param_groups[0]["lr"])

    @property
    def _globalstep_last_logged(self) -> int:
        return 0 if self.current_run is None else self.current_run.window.last_logged_step

    @_globalstep_last_logged.setter
    def _globalstep_last_logged(self, step: int) -> None:
        self._run_that_calls("_globalstep_last_logged").window.last_logged_step = step

    @property
    def _total_loss_scalar(self) -> float:
        return 0.0 if self.current_run is None else self.current_run.window.logged_loss

    @_total_loss_scalar.setter
    def _total_loss_scalar(self, loss: float) -> None:
        self._run_that_calls("_total_loss_scalar").window.logged_loss = loss

    # The run

    def _run_that_calls(self, name: str) -> Run:
        if self.current_run is None:
            raise RuntimeError(
                f"{name} was used outside of training; it belongs to a run, which train() begins and ends: use it in "
                "an override that the run calls, as _maybe_log_save_evaluate"
            )
        return self.current_run
