"""The Trainer: what is done with a model, in methods that a subclass may override."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from tr_core.evaluation import EvaluationLoop, prediction_step
from tr_core.loaders import eval_loader, keeping_columns, train_loader
from tr_core.optimizers import build_optimizer, decay_parameter_names, parameter_groups
from tr_core.reporting import Reporting
from tr_core.results import EvalLoopOutput, PredictionOutput, TrainOutput
from tr_core.schedules import PLATEAU, get_scheduler
from tr_core.session import Resume
from tr_core.session import train as run_session
from tr_core.speed import speed_metrics
from tr_core.stepping import Stepping


class Trainer(Stepping, Reporting):
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

    # Evaluation

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
