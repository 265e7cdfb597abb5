"""The Trainer: what is done with a model, in methods that a subclass may override."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from tr_core import saving
from tr_core.assembly import Assembly
from tr_core.evaluation import EvaluationLoop, prediction_step
from tr_core.loaders import eval_loader, keeping_columns, train_loader
from tr_core.model_io import loss_of, to_device
from tr_core.optimizers import build_optimizer, decay_parameter_names, parameter_groups
from tr_core.results import EvalLoopOutput, PredictionOutput, TrainOutput
from tr_core.schedules import PLATEAU, get_scheduler
from tr_core.session import Resume
from tr_core.session import train as run_session
from tr_core.speed import speed_metrics


class Trainer(Assembly):
    """A complete training and evaluation loop for a PyTorch model.

    Args:
        model: any module; its forward takes a batch (by keywords if batches are mappings) and returns its loss.
        args: the training arguments; default ones write to `trainer_output`.
        data_collator: makes a batch of a list of samples; by default pads with `processing_class` if that can pad,
            else stacks.
        train_dataset: map-style or iterable data.
        eval_dataset: likewise, or a dict of several.
        processing_class: a tokenizer or processor, saved with the model; `tokenizer` is the same.
        model_init: makes a new model for every call of `train`, in place of `model`.
        compute_loss_func: `(outputs, labels, num_items_in_batch=)` → loss, in place of the model's own.
        compute_metrics: `(EvalPrediction)` → dict of metrics.
        callbacks: callbacks or their classes; `callback` is the same.
        optimizers: an optimizer and a schedule to use; None has the arguments decide.
        preprocess_logits_for_metrics: `(logits, labels)` → what is kept of each evaluation batch.
        strategy: where and how to compute; by default what the arguments and the launcher say.
        checkpointer: where checkpoints go; by default what the arguments name.

    Building one changes no random number generator and moves no model: that happens in `train` and `evaluate`.

    Raises:
        ValueError: arguments ask for what is not there.
        NotImplementedError: arguments ask for what this version does not do.
    """

    # Running

    def train(
        self,
        resume_from_checkpoint: Resume = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        """Train to the end of the run.

        Args:
            resume_from_checkpoint: True continues from the newest valid checkpoint in `output_dir` and fails if there
                is none; `auto` begins anew instead; a folder names one. None takes the argument of that name.
            ignore_keys_for_eval: outputs of the model that evaluations during training leave out.

        Returns:
            Steps, mean loss and metrics. Resuming a finished run changes nothing.

        Raises:
            ValueError: nothing to train on, nothing to resume from, or a damaged checkpoint was named.
        """
        resume = self.args.resume_from_checkpoint if resume_from_checkpoint is None else resume_from_checkpoint
        return run_session(self, resume, ignore_keys_for_eval)

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Evaluate, log and return the metrics.

        Args:
            eval_dataset: data instead of the Trainer's own; a dict of data sets is evaluated one by one, with
                `<prefix>_<name>` before each one's metrics; a string names one of the Trainer's.
            ignore_keys: outputs of the model that are left out.
            metric_key_prefix: what the metrics' names begin with.
        """
        chosen = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(chosen, dict):
            merged: dict[str, float] = {}
            for name, dataset in chosen.items():
                source = name if eval_dataset is None else dataset
                merged |= self.evaluate(source, ignore_keys, f"{metric_key_prefix}_{name}")
            return merged
        loader = self.get_eval_dataloader(eval_dataset)
        output = self._timed_loop(loader, "Evaluation", ignore_keys, metric_key_prefix)
        self.log(dict(output.metrics))
        output.metrics["epoch"] = self.state.epoch
        self.fire("on_evaluate", metrics=output.metrics)
        return output.metrics

    def predict(
        self, test_dataset: Any, ignore_keys: list[str] | None = None, metric_key_prefix: str = "test"
    ) -> PredictionOutput:
        """Predict for every sample of a data set, with metrics if it has labels.

        Args:
            test_dataset: the data.
            ignore_keys: outputs of the model that are left out.
            metric_key_prefix: what the metrics' names begin with.
        """
        loader = self.get_test_dataloader(test_dataset)
        output = self._timed_loop(loader, "Prediction", ignore_keys, metric_key_prefix)
        self.fire("on_predict", metrics=output.metrics)
        return PredictionOutput(output.predictions, output.label_ids, output.metrics)

    # Data

    def get_train_dataloader(self) -> Any:
        """Build the loader of the training data: batches of this rank, in the seeded order.

        An override may return any iterable of batches; resuming then draws and drops the batches already used.
        """
        if self.train_dataset is None:
            raise ValueError("training needs a train_dataset; it is None")
        return train_loader(self.train_dataset, self._collator(), self.args, self.strategy)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """Build the loader of evaluation data.

        Args:
            eval_dataset: the data, or the name of one of the Trainer's data sets; None is the Trainer's own.
        """
        if isinstance(eval_dataset, str):
            eval_dataset = self.eval_dataset[eval_dataset]
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if dataset is None:
            raise ValueError("evaluation needs an eval_dataset; the Trainer has none and none was given")
        return eval_loader(dataset, self._collator(), self.args, self.strategy)

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        """Build the loader of the data to predict."""
        return eval_loader(test_dataset, self._collator(), self.args, self.strategy)

    def num_examples(self, dataloader: Any) -> int:
        """Count the samples behind a loader of all ranks; batches times batch size where it does not tell."""
        try:
            return len(dataloader.dataset)
        except (AttributeError, TypeError):
            return len(dataloader) * self.args.train_batch_size

    # Optimizer and schedule

    def create_optimizer_and_scheduler(self, num_training_steps: int) -> None:
        """Build the optimizer and the schedule, unless they were given."""
        self.create_optimizer()
        self.create_scheduler(num_training_steps)

    def create_optimizer(self) -> torch.optim.Optimizer:
        """Build the optimizer that the arguments name and keep it as `self.optimizer`, unless there is one."""
        self.prepare()
        if self.optimizer is None:
            names = self.get_decay_parameter_names(self.model)
            groups = parameter_groups(self.model, self.args.weight_decay, names)
            self.optimizer = build_optimizer(groups, self.args)
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None) -> LRScheduler:
        """Build the schedule that the arguments name and keep it as `self.lr_scheduler`, unless there is one."""
        if self.lr_scheduler is None:
            options = dict(self.args.lr_scheduler_kwargs or {})
            if self.args.lr_scheduler_type == PLATEAU:
                options.setdefault("mode", "max" if self.args.greater_is_better else "min")
            self.lr_scheduler = get_scheduler(
                self.args.lr_scheduler_type,
                optimizer if optimizer is not None else self.optimizer,
                num_warmup_steps=self.args.get_warmup_steps(num_training_steps),
                num_training_steps=num_training_steps,
                scheduler_specific_kwargs=options,
            )
        return self.lr_scheduler

    def renew_optimizer(self, num_training_steps: int) -> tuple[torch.optim.Optimizer, LRScheduler]:
        """Build optimizer and schedule for a new run; those that were given are used as they are."""
        self.optimizer, self.lr_scheduler = self._given_optimizers
        self.create_optimizer_and_scheduler(num_training_steps)
        if self.optimizer is None or self.lr_scheduler is None:
            raise ValueError(
                "create_optimizer_and_scheduler left self.optimizer or self.lr_scheduler None; it must set both"
            )
        return self.optimizer, self.lr_scheduler

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Return the names of the parameters that weight decay applies to: no biases, no scales of norms."""
        return decay_parameter_names(model)

    def get_learning_rates(self) -> list[float]:
        """Return the learning rate of each parameter group as it is now."""
        return [group["lr"] for group in self.create_optimizer().param_groups]

    def get_optimizer_group(self, param: torch.Tensor | None = None) -> Any:
        """Return the parameter group that holds `param`, or all groups."""
        groups = self.create_optimizer().param_groups
        if param is None:
            return groups
        return next(group for group in groups if any(param is member for member in group["params"]))

    # One step

    def training_step(
        self, model: nn.Module, inputs: Any, num_items_in_batch: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Compute loss and gradients of one micro-batch.

        Args:
            model: the wrapped model, in training mode.
            inputs: the batch, with tensors on the host.
            num_items_in_batch: targets of the whole step over all ranks, a scalar tensor; None where not counted.

        Returns:
            This micro-batch's share of the step's loss, detached, on the device: nothing is read back.
        """
        inputs = to_device(inputs, self.strategy.device)
        count = {}
        if num_items_in_batch is not None and self._loss_takes_count:
            count = {"num_items_in_batch": self.loss_rule.hand_over(num_items_in_batch)}
        with self.strategy.autocast():
            loss = self.compute_loss(model, inputs, **count)
        if count or self.micro_batches_in_step > 1 or self.micro_batch_weight != 1.0:
            loss = self.loss_rule.normalise(loss, bool(count), self.micro_batches_in_step, self.micro_batch_weight)
        self.strategy.backward(loss)
        return loss.detach()

    def compute_loss(
        self,
        model: nn.Module,
        inputs: Any,
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | None = None,
    ) -> Any:
        """Compute the loss of one batch: the model's own, or that of `compute_loss_func`.

        An override may leave out `num_items_in_batch`; its loss is then a mean over the batch.

        Args:
            model: the wrapped model.
            inputs: the batch, on the device.
            return_outputs: also return what the model gave.
            num_items_in_batch: what a summed loss is to be divided by, a scalar tensor.

        Returns:
            A scalar tensor, or a pair of it and the model's outputs.
        """
        function, labels = self.loss_function, None
        if function is not None:
            inputs, labels = self._split_labels(inputs)
        if num_items_in_batch is not None and self.loss_rule.tells_model:
            inputs = {**inputs, "num_items_in_batch": num_items_in_batch}
        outputs = self.call_model(model, inputs)
        if function is None:
            loss = loss_of(outputs, inputs)
        else:
            extra = {"num_items_in_batch": num_items_in_batch} if self.loss_rule.counts else {}
            loss = function(outputs, labels, **extra)
        return (loss, outputs) if return_outputs else loss

    def call_model(self, model: nn.Module, inputs: Any) -> Any:
        """Call the model with a batch: mappings by keyword, tuples and lists by position."""
        if hasattr(inputs, "keys"):
            return model(**inputs)
        return model(*inputs) if isinstance(inputs, list | tuple) else model(inputs)

    def loss_and_outputs(self, model: nn.Module, inputs: Any) -> tuple[torch.Tensor, Any]:
        """Compute the loss of one evaluation batch, over its own targets, with the model's outputs."""
        if not self._loss_takes_count:
            return self.compute_loss(model, inputs, return_outputs=True)
        count = self.loss_rule.count_inputs(inputs) if self.loss_rule.counts else None
        return self.compute_loss(model, inputs, return_outputs=True, num_items_in_batch=count)

    def floating_point_ops(self, inputs: Any) -> int:
        """Return the floating-point operations of forward and backward of one batch; 0 where not known."""
        return self.flop_counter.count(inputs)

    def counts_floating_point_ops(self) -> bool:
        """Whether `floating_point_ops` can say anything: the model tells, or a subclass does."""
        return self.flop_counter.knows or type(self).floating_point_ops is not Trainer.floating_point_ops

    def prediction_step(
        self,
        model: nn.Module,
        inputs: Any,
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[torch.Tensor | None, Any, Any]:
        """Run the model on one evaluation batch without gradients.

        Returns:
            Loss (None without labels), logits (None with `prediction_loss_only`), labels (None without).
        """
        return prediction_step(self, model, inputs, prediction_loss_only, ignore_keys)

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Go through evaluation data and return predictions, labels, metrics and the number of samples.

        Args:
            dataloader: batches of this rank.
            description: what this is, for the log.
            prediction_loss_only: keep no predictions; None keeps them only where metrics are computed of them.
            ignore_keys: outputs of the model that are left out.
            metric_key_prefix: what the metrics' names begin with.
        """
        loss_only = self.args.prediction_loss_only if prediction_loss_only is None else prediction_loss_only
        self.prepare()
        self.loaders["eval_dataloader"] = dataloader
        self.logger.debug("%s begins at step %d", description, self.state.global_step)
        return EvaluationLoop(self, loss_only, ignore_keys, metric_key_prefix).run(dataloader)

    # What is written

    def log(self, logs: dict[str, Any], start_time: float | None = None) -> None:
        """Add an entry to `state.log_history` and tell the callbacks.

        Args:
            logs: names and values; `epoch` is added.
            start_time: accepted for overrides that pass it on.
        """
        logs["epoch"] = self.state.epoch
        self.state.log_history.append({**logs, "step": self.state.global_step})
        self.fire("on_log", logs=logs)

    def save_model(self, output_dir: str | Path | None = None) -> None:
        """Write weights (safetensors), configuration and tokenizer; every rank calls, rank 0 writes."""
        self.prepare()
        saving.save_model(self, Path(output_dir or self.args.output_dir))

    def push_to_hub(self, commit_message: str = "End of training", blocking: bool = True) -> Any:
        """Save the model to `output_dir` and push it to the Hub repository that the arguments name.

        Args:
            commit_message: what the commit says.
            blocking: return when it is there; else push in the background.

        Raises:
            tr_core.plugins.PluginError: the package that pushes is not installed.
        """
        self.save_model()
        self.fire("on_push_begin")
        if not self.is_world_process_zero():
            return None
        hub = saving.find_hub(self.callback_handler.callbacks, self.args)
        return hub.push_to_hub(self.args.output_dir, commit_message=commit_message, blocking=blocking)

    def save_state(self) -> None:
        """Write `trainer_state.json` to the output folder."""
        if self.is_world_process_zero():
            folder = Path(self.args.output_dir)
            folder.mkdir(parents=True, exist_ok=True)
            self.state.save_to_json(folder / "trainer_state.json")

    def log_metrics(self, split: str, metrics: dict[str, float]) -> None:
        """Print metrics readably, on the main process."""
        if self.is_world_process_zero():
            print("\n".join([f"***** {split} metrics *****", *saving.metric_lines(metrics)]))

    def save_metrics(self, split: str, metrics: dict[str, float], combined: bool = True) -> None:
        """Write metrics to `<split>_results.json`, and with `combined` into `all_results.json` too."""
        if self.is_world_process_zero():
            saving.save_metrics(Path(self.args.output_dir), split, metrics, combined)

    # Within

    def _collator(self) -> Any:
        if not self.args.remove_unused_columns:
            return self.data_collator
        return keeping_columns(self.data_collator, self.model, self.label_names)

    def _timed_loop(self, loader: Any, description: str, ignore_keys: list[str] | None, prefix: str) -> EvalLoopOutput:
        start_s = time.perf_counter()
        # Without metrics nobody looks at the predictions of an evaluation.
        loss_only = True if description == "Evaluation" and self.compute_metrics is None else None
        output = self.evaluation_loop(loader, description, loss_only, ignore_keys, prefix)
        steps = -(-output.num_samples // (self.args.eval_batch_size * self.strategy.world_size))
        output.metrics.update(speed_metrics(prefix, start_s, output.num_samples, steps))
        return output

    def _split_labels(self, inputs: Any) -> tuple[Any, Any]:
        """Take the labels out of a batch for `compute_loss_func`: by name, or the last of a tuple."""
        if isinstance(inputs, list | tuple):
            return inputs[:-1], inputs[-1]
        rest = dict(inputs)
        return rest, rest.pop("labels", None)
