"""The Trainer: train, evaluate, predict, and the data loaders, in methods that a subclass may override."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from tr_core.checkpoint.restoring import Resume
from tr_core.data.limits import evaluates_training_batches, limited_batches
from tr_core.data.loaders import UsualOrder, is_map_style, usual_order
from tr_core.evaluation.best_metric import check_best_metric, may_add_metrics
from tr_core.evaluation.evaluation_loop import (
    EvaluationLoop,
    EvaluationOptions,
    evaluation_mode,
    kept_logits,
    read_labels,
)
from tr_core.evaluation.gather import map_objects, map_tensors
from tr_core.evaluation.metrics import EvaluationLoss, is_streaming
from tr_core.model_io import main_input_name
from tr_core.preflight.requested import stop_if_requested
from tr_core.results import EvalLoopOutput, PredictionOutput, TrainOutput, speed_metrics
from tr_core.runtime.run_context import evaluation_context
from tr_core.trainer.run_methods import Running
from tr_log.phases import EVALUATION, phase
from tr_log.streams import usable_streams


class Trainer(Running):
    """Train and evaluate a PyTorch model with a complete loop.

    Args:
        model: any module; its forward takes a batch (by keywords if batches are mappings) and returns its loss.
        args: the training arguments; default ones write to `trainer_output`.
        data_collator: builds a batch from a list of samples; by default pads with `processing_class` if that can pad,
            else stacks.
        train_dataset: map-style or iterable data.
        eval_dataset: map-style or iterable data, or a dict of several.
        processing_class: a tokenizer or processor, saved with the model; `tokenizer` is the same.
        model_init: builds a new model for every call of `train`, in place of `model`. If it takes an argument, it gets
            the trial of a hyper-parameter search, else None.
        compute_loss_func: `(outputs, labels, num_items_in_batch=)` → loss, in place of the model's own.
        compute_metrics: `(EvalPrediction)` → dict of metrics; or an object with `update(preds, target)`, `compute()`
            and `reset()`, as in torchmetrics, or a dict of several by name. They get each batch, and no outputs are
            kept for them.
        callbacks: callbacks or their classes; `callback` is the same.
        optimizers: an optimizer and a schedule to use; for None the arguments select one.
        optimizer_cls_and_kwargs: a class of optimizers and its keyword arguments, in place of the one that the
            arguments name; it gets the parameter groups.
        preprocess_logits_for_metrics: `(logits, labels)` → what is kept of each evaluation batch.
        strategy: where and how to compute; by default the arguments and the launcher select it.
        checkpointer: saves and restores checkpoints; by default the arguments name it.

    Building a Trainer changes no random number generator and moves no model: `train` and `evaluate` do that.

    Raises:
        ValueError: arguments need something that is missing.
    """

    # Running

    def train(
        self,
        resume_from_checkpoint: Resume = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        """Train to the end of the run.

        Args:
            resume_from_checkpoint: True resumes from the newest valid checkpoint in `output_dir`, and fails if there is
                none. `auto` starts from scratch instead of failing. A folder names one checkpoint. None takes the
                argument of that name.
            trial: the trial of a search, or a dict. It is passed to `model_init` if that takes an argument. The state
                records it as the run's parameters. It changes no argument.
            ignore_keys_for_eval: outputs of the model that evaluations during training skip.

        Returns:
            Steps, mean loss and metrics. Resuming a finished run changes nothing.

        Raises:
            ValueError: there is nothing to train on or to resume from, or the named checkpoint is damaged. Or no
                evaluation can return the metric that selects the best model.
            RuntimeError: this Trainer is training already, and a callback or override calls this.
        """
        if self.is_in_train:
            raise RuntimeError(
                f"train() was called while this Trainer is training already, at step {self.state.global_step} of "
                f"{self.state.max_steps}; call it when the run has ended, or train with another Trainer"
            )
        stop_if_requested(self, resume=resume_from_checkpoint, trains=True)
        functions = (self.compute_metrics, self.compute_loss_func, self.preprocess_logits_for_metrics)
        if not may_add_metrics(self.overrides, self.callback_handler.callbacks, functions):
            check_best_metric(self.args, self.eval_dataset)
        resume = self.args.resume_from_checkpoint if resume_from_checkpoint is None else resume_from_checkpoint
        resume = None if self.args.fast_dev_run else resume
        self.trial = trial
        try:
            return self._run(resume, ignore_keys_for_eval)
        finally:
            self.trial = None

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Evaluate, log and return the metrics.

        Args:
            eval_dataset: data instead of the Trainer's own. The datasets of a dict are evaluated one by one, with
                `<prefix>_<name>` before the metrics of each. A string names one of the Trainer's datasets.
            ignore_keys: outputs of the model to skip.
            metric_key_prefix: prefix of the metrics' names.

        Raises:
            ValueError: there is nothing to evaluate on.
            TypeError: `compute_metrics` returned no dict.
        """
        stop_if_requested(self, evaluation_data=eval_dataset)
        self.prepare()
        chosen = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(chosen, dict):
            merged: dict[str, float] = {}
            for name, dataset in chosen.items():
                source = name if eval_dataset is None else dataset
                prefix = f"{metric_key_prefix}_{name}"
                merged |= self.evaluate(eval_dataset=source, ignore_keys=ignore_keys, metric_key_prefix=prefix)
            return merged
        if evaluates_training_batches(self.args, eval_dataset):
            loader = limited_batches(self.get_train_dataloader(), self.args, self.strategy)
        else:
            loader = self.get_eval_dataloader(chosen)
        with self._in_evaluation():
            output = self._timed_loop(loader, "Evaluation", ignore_keys, metric_key_prefix)
            self.log_result(output.metrics)
            self.fire("on_evaluate", metrics=output.metrics)
        return output.metrics

    def predict(
        self, test_dataset: Any, ignore_keys: list[str] | None = None, metric_key_prefix: str = "test"
    ) -> PredictionOutput:
        """Predict for every sample of a dataset, with metrics if it has labels.

        Args:
            test_dataset: the data.
            ignore_keys: outputs of the model to skip.
            metric_key_prefix: prefix of the metrics' names.
        """
        stop_if_requested(self, evaluation_data=test_dataset)
        self.prepare()
        loader = self.get_test_dataloader(test_dataset)
        with self._in_evaluation():
            output = self._timed_loop(loader, "Prediction", ignore_keys, metric_key_prefix)
            self.fire("on_predict", metrics=output.metrics)
        return PredictionOutput(output.predictions, output.label_ids, output.metrics)

    # Callbacks

    def add_callback(self, callback: Any) -> None:
        """Append a callback, or an instance of a callback class."""
        self.callback_handler.add(callback)

    def pop_callback(self, callback: Any) -> Any:
        """Remove and return a callback: this object, or the first of this class; None if there is none."""
        return self.callback_handler.pop(callback)

    def remove_callback(self, callback: Any) -> None:
        """Remove a callback: this object, or the first of this class."""
        self.callback_handler.pop(callback)

    def end(self) -> None:
        """Leave the process group, at the very end of a script. Without this call the end of the process does it."""
        self.strategy.close()

    # Data

    def get_train_dataloader(self) -> Any:
        """Build the loader of the training data: batches of this rank, in the seeded order.

        An override may return any iterable of batches; resuming then draws and drops the batches already used.
        """
        if self.train_dataset is None:
            raise ValueError("training needs a train_dataset; it is None")
        return self._get_dataloader(
            dataset=self.train_dataset,
            description="Training",
            batch_size=self._train_batch_size,
            sampler_fn=self._get_train_sampler,
            is_training=True,
        )

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        """Return a sampler of the training samples' indices, with a length; None lets the arguments select one.

        For overrides, as with a `WeightedRandomSampler`. Every epoch iterates it again, all ranks share its order, and
        a resumed run continues in it. What this method returns is for a loader of one's own.
        """
        data = self.train_dataset if train_dataset is None else train_dataset
        return usual_order(data, self.args, self.strategy, main_input_name(self.model, self.processing_class))

    def _get_eval_sampler(self, eval_dataset: Any) -> Any:
        """Return a sampler of the evaluation samples' indices, with a length; None uses every sample in order."""
        return UsualOrder(eval_dataset, "sequential") if is_map_style(eval_dataset) else None

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """Build the loader of evaluation data; with persistent workers, reuse the last one.

        Args:
            eval_dataset: the data, or the name of one of the Trainer's datasets; None is the Trainer's own.

        Raises:
            ValueError: there is no such data.
        """
        own = eval_dataset is None or eval_dataset is self.eval_dataset or isinstance(eval_dataset, str)
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(eval_dataset, str):
            dataset = _named(eval_dataset, self.eval_dataset)
        if dataset is None:
            raise ValueError("evaluation needs an eval_dataset; the Trainer has none and none was given")
        key = None if not own else eval_dataset if isinstance(eval_dataset, str) else "eval"
        return self._get_dataloader(
            dataset=dataset,
            description="Evaluation",
            batch_size=self.args.eval_batch_size,
            sampler_fn=self._get_eval_sampler,
            dataloader_key=key,
        )

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        """Build the loader of the data to predict."""
        return self._get_dataloader(
            dataset=test_dataset, description="Prediction", batch_size=self.args.eval_batch_size
        )

    def num_examples(self, dataloader: Any) -> int:
        """Count the samples behind a loader of all ranks; for an unknown number, return batches times batch size."""
        try:
            return len(dataloader.dataset)
        except (AttributeError, TypeError):
            return len(dataloader) * self.args.train_batch_size

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
        if self.prepares_inputs:
            inputs = self._prepare_inputs(inputs)
        has_function = self.loss_function is not None
        detach = map_objects if self.args.eval_use_gather_object else map_tensors
        labels, gives_loss = read_labels(
            inputs,
            self.label_names,
            has_loss_function=has_function,
            returns_loss=self.can_return_loss,
            detach=detach,
        )
        loss, context = None, nullcontext
        if gives_loss and self.splits_sequences:
            context, inputs = self._prepare_context_parallel_inputs(model, inputs)
        with torch.no_grad(), self.loss_context(), context():
            if gives_loss:
                loss, outputs = self.loss_and_outputs(model, inputs)
                loss = loss.detach().mean()
            else:
                outputs = self.call_model(model, inputs)
        if prediction_loss_only:
            return loss, None, None
        skip_first = gives_loss and not has_function
        return loss, kept_logits(outputs, self.model, ignore_keys, skip_first=skip_first, detach=detach), labels

    @contextmanager
    def evaluation_context(self) -> Iterator[object]:
        """Return a block for an evaluation or prediction, from its first batch to its last event; never nested.

        By default the model is in evaluation mode, with the callbacks' weights for evaluation. Afterwards, also after
        an exception, each module is in its own mode again, with the trained weights. An override must also enter this
        context.
        """
        with self.holding_evaluation_weights(), evaluation_mode(self.model_wrapped):
            yield

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Evaluate on all batches, and return predictions, labels, metrics and the number of samples.

        Args:
            dataloader: batches of this rank.
            description: a name for the log; "Prediction" keeps predictions also with `batch_eval_metrics`.
            prediction_loss_only: keep no predictions, and compute only streaming metrics; None takes the argument of
                that name.
            ignore_keys: outputs of the model to skip.
            metric_key_prefix: prefix of the metrics' names.
        """
        loss_only = self.args.prediction_loss_only if prediction_loss_only is None else prediction_loss_only
        self.loaders["eval_dataloader"] = dataloader
        self.logger.debug("%s begins at step %d", description, self.state.global_step)
        options = EvaluationOptions(
            loss_only,
            ignore_keys,
            metric_key_prefix,
            predicts=description == "Prediction",
            main_input=getattr(self.model, "main_input_name", "input_ids"),
        )
        with self._in_evaluation(), self._evaluation_settings(), self.scope.separate_window(self.strategy) as window:
            args, strategy = self.args, self.strategy
            loss = EvaluationLoss(args, strategy, self.loss_rule, takes_count=self._loss_takes_count)
            loop = EvaluationLoop(self, options, args, strategy, self.scope, loss, compute_metrics=self.compute_metrics)
            return loop.run(dataloader, self.model_wrapped, window)

    # Internal

    @contextmanager
    def _in_evaluation(self) -> Iterator[None]:
        """Enter `evaluation_context` around an evaluation and its events; inside it already, do nothing."""
        if self.is_in_evaluation:
            yield
            return
        self.prepare()
        self.is_in_evaluation = True
        try:
            with usable_streams(), self.evaluation_context():
                yield
        finally:
            self.is_in_evaluation = False

    def _evaluation_settings(self) -> AbstractContextManager[None]:
        args, model, device, state = self.args, self.model, self.strategy.device, self.state
        names, compilation, is_in_train = self.label_names, self.compilation, self.is_in_train
        return evaluation_context(args, model, device, names, compilation, state, is_in_train=is_in_train)

    def _timed_loop(self, loader: Any, description: str, ignore_keys: list[str] | None, prefix: str) -> EvalLoopOutput:
        start_s = time.perf_counter()
        # Without a function of all predictions, nothing uses the predictions of an evaluation.
        unseen = self.compute_metrics is None or is_streaming(self.compute_metrics)
        options: dict[str, Any] = {"ignore_keys": ignore_keys, "metric_key_prefix": prefix}
        if description == "Evaluation":
            options["prediction_loss_only"] = True if unseen else None
        with phase(EVALUATION), self.memory.stage(prefix) as read_memory:
            # By name: an override may have its parameters in another order, or only keyword parameters.
            output = self.evaluation_loop(loader, description=description, **options)
            output.metrics.update(read_memory())
        steps = -(-output.num_samples // (self.args.eval_batch_size * self.strategy.world_size))
        output.metrics.update(speed_metrics(prefix, start_s, output.num_samples, steps))
        return output


Trainer.own_class = Trainer


def _named(name: str, datasets: Any) -> Any:
    known = datasets if isinstance(datasets, dict) else {}
    if name not in known:
        names = ", ".join(map(repr, known)) or "none, as eval_dataset is no dict"
        raise ValueError(f"there is no evaluation data set named {name!r}; those of this Trainer are: {names}")
    return known[name]
