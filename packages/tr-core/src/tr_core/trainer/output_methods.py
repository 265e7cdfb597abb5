"""Log metrics, and save models, states and metrics, in methods that a subclass may override."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from tr_core.callbacks.evaluation_weights import evaluation_weights
from tr_core.checkpoint import saving
from tr_core.metric_means import MetricWindow
from tr_core.preflight.requested import stop_if_requested
from tr_core.runtime.run_context import training_context
from tr_core.trainer.step_hooks import StepHooks
from tr_log.terminal import write_line


class Reporting(StepHooks):
    """Log and save."""

    @property
    def metric_window(self) -> MetricWindow | None:
        """The window that `log_metric` adds to, in a run or an evaluation; None outside both."""
        return self.scope.metrics

    @metric_window.setter
    def metric_window(self, window: MetricWindow | None) -> None:
        self.scope.metrics = window

    @contextmanager
    def holding_evaluation_weights(self) -> Iterator[None]:
        """Swap in the weights to evaluate and to export inside the block; restore the trained weights after it."""
        with self.optimizer_in_evaluation(), evaluation_weights(self.callback_handler.callbacks, self.model):
            yield

    def training_context(self) -> AbstractContextManager[None]:
        """Return a block that applies the arguments' settings of device and model during training."""
        return training_context(self.args, self.model, self.strategy.device, self.use_cache, self.compilation)

    def optimizer_in_evaluation(self) -> AbstractContextManager[None]:
        """Swap in the evaluation weights of an optimizer that has two sets of weights; during a run only."""
        return self.optimizer_mode.evaluating(self.optimizer) if self.is_in_train else nullcontext()

    def log_metric(self, name: str, value: float | torch.Tensor, weight: float | torch.Tensor = 1.0) -> None:
        """Average and log a value: from `compute_loss`, `training_step` or a callback.

        In training it computes the mean over the steps since the last log and over all ranks. The next log shows it
        together with `loss`. Within an evaluation it computes the mean over that evaluation, as the metric
        `<prefix>_<name>`, unless `compute_metrics` returns one of that name. Ranks may log different names, or none.
        Nothing is read from the device. Checkpoints save an open window.

        Args:
            name: its name in the log; not a name that an entry has already, as `loss`.
            value: a number, or a tensor with one element, without its graph.
            weight: how much this value counts in the mean; not negative. If a rank has only a filler sample in a
                micro-batch, the value counts nothing.

        Raises:
            RuntimeError: neither training nor an evaluation is running.
            ValueError: the name is taken, the value is no scalar, or the weight is negative or infinite.
            TypeError: value or weight is no number.
        """
        if self.metric_window is None:
            raise RuntimeError(
                f"log_metric({name!r}) has nothing to average over: neither training nor an evaluation is going on; "
                "write values to the log at once with log({...})"
            )
        if self.scope.weight != 0.0:
            self.metric_window.add(name, value, weight)

    def log(self, logs: dict[str, Any], start_time: float | None = None) -> None:
        """Add an entry to `state.log_history`, and fire `on_log`.

        Args:
            logs: names and values; `epoch` is added, and `num_input_tokens_seen` if tokens are counted.
            start_time: accepted for overrides that pass it on.
        """
        self.stamp(logs)
        self.state.log_history.append({**logs, "step": self.state.global_step})
        self.fire("on_log", logs=logs)

    def log_result(self, metrics: dict[str, Any]) -> None:
        """Log the metrics of an evaluation or a run, and add to them what an override of `log` adds to the entry."""
        entries = self.state.log_history
        number = len(entries)
        self.log(metrics)
        for entry in entries[number:]:  # an override may have passed on another dict
            for name, value in entry.items():
                if name != "step":
                    metrics.setdefault(name, value)
        self.stamp(metrics)

    def stamp(self, metrics: dict[str, Any]) -> None:
        """Add the progress of the run to metrics: `epoch`, and `num_input_tokens_seen` if tokens are counted."""
        metrics["epoch"] = self.state.epoch
        if self.args.include_num_input_tokens_seen != "no":
            metrics["num_input_tokens_seen"] = self.state.num_input_tokens_seen

    def save_model(self, output_dir: str | Path | None = None, _internal_call: bool = False) -> None:
        """Write weights (safetensors), configuration and tokenizer. Collective.

        Rank 0 writes; with `save_on_each_node`, the first rank of every machine does, if the model is not sharded.
        With `ema_decay` the weights are the average. A run calls an override for each checkpoint too, on all ranks and
        with `_internal_call=True`.
        """
        if self._state_to_save is not None:  # a checkpoint's
            self._save(str(output_dir or self.args.output_dir), state_dict=self._state_to_save)
            return
        stop_if_requested(self)
        self.prepare()
        folder = str(output_dir or self.args.output_dir)
        with self.holding_evaluation_weights(), self.use_cache.original(self.model):
            state = self.strategy.full_state_dict(self.model_wrapped)
            # The state of a sharded model is on rank 0 alone. An override may exchange between ranks.
            if self.strategy.rank == 0 or (self.args.should_save and state) or self.overrides("_save"):
                self._save(folder, state_dict=state)
            self.strategy.barrier()

    def _save_companions(self, folder: Path) -> None:
        processor = saving.find_processor(self.processing_class, self.data_collator)
        saving.save_companions(folder, self.model, self.args, processor, self.use_cache)

    def save_state(self) -> None:
        """Write `trainer_state.json` to the output folder."""
        if self.is_world_process_zero():
            folder = Path(self.args.output_dir)
            folder.mkdir(parents=True, exist_ok=True)
            self.state.save_to_json(folder / "trainer_state.json")

    def log_metrics(self, split: str, metrics: dict[str, float]) -> None:
        """Print metrics in readable form, on the main process."""
        if self.is_world_process_zero():
            lines = [f"***** {split} metrics *****", *saving.metric_lines(self.metrics_format(metrics))]
            write_line(sys.stdout, "\n".join(lines))

    def metrics_format(self, metrics: dict[str, float]) -> dict[str, Any]:
        """Return metrics in `log_metrics` form: run times as h:m:s, operations in GF, numbers to four decimals."""
        return saving.format_metrics(metrics)

    def save_metrics(self, split: str, metrics: dict[str, float], combined: bool = True) -> None:
        """Write metrics to `<split>_results.json`, and with `combined` also to `all_results.json`."""
        if self.is_world_process_zero():
            saving.save_metrics(Path(self.args.output_dir), split, metrics, combined)
