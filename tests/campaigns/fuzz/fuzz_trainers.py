"""Build a run's Trainer, ours or transformers', train, and note what is seen."""

import gc
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from fuzz_configuration import OVERRIDES, Run
from fuzz_data import evaluation_data, own_loader, stack, training_data
from fuzz_losses import function_of, override_of
from fuzz_models import model_of
from fuzz_optimizers import SCHEDULES, optimizer_of, schedule_of
from fuzz_trace import Trace, figures

import tr_core
import tr_log

sys.path.append(str(Path(__file__).parents[2] / "parity"))
from parity_recorder import Recorder


@dataclass(frozen=True)
class Side:
    """One of two Trainers, with what belongs to it."""

    name: str
    trainer: Any
    arguments: Any
    early_stopping: Any
    printer: Any


def _side(name, module, printer):
    return Side(name, module.Trainer, module.TrainingArguments, module.EarlyStoppingCallback, printer)


REFERENCE = _side("transformers", transformers, transformers.PrinterCallback)
OURS = _side("ours", tr_core, tr_log.PrinterCallback)


def arguments_of(run: Run, folder):
    """Return the training arguments that a run says, common to both Trainers."""
    batch = run.batch // run.replicas
    said = {
        "output_dir": str(folder),
        "use_cpu": True,
        "report_to": "none",
        "disable_tqdm": True,
        "log_level": "error",
        "seed": run.seed,
        "data_seed": run.data_seed,
        "per_device_train_batch_size": batch,
        "gradient_accumulation_steps": run.accumulation,
        "num_train_epochs": run.epochs,
        "max_steps": run.max_steps,
        "dataloader_drop_last": run.drop_last,
        "dataloader_num_workers": run.workers,
        "train_sampling_strategy": run.order,
        "learning_rate": run.rate,
        "weight_decay": run.decay,
        "adam_beta1": run.betas[0],
        "adam_beta2": run.betas[1],
        "bf16": run.bf16,
        "eval_accumulation_steps": run.eval_flush,
        "include_num_input_tokens_seen": run.tokens_seen,
        "lr_scheduler_type": run.schedule,
        "lr_scheduler_kwargs": SCHEDULES[run.schedule],
        "warmup_steps": run.warmup,
        "max_grad_norm": run.clip,
        "logging_strategy": run.logging,
        "logging_steps": run.logging_steps,
        "logging_first_step": run.log_first,
        "eval_strategy": run.evaluation,
        "eval_steps": run.eval_steps,
        "eval_delay": run.eval_delay,
        "eval_on_start": run.eval_first,
        "per_device_eval_batch_size": run.eval_batch,
        "save_strategy": run.save,
        "save_steps": run.save_steps,
        "ignore_data_skip": run.restarts,
        "load_best_model_at_end": run.best,
        "label_smoothing_factor": 0.2 if run.loss == "smoothing" else 0.0,
    }
    if run.optimizer in ("adamw_torch", "adamw_torch_fused", "sgd", "adafactor", "adagrad", "rmsprop"):
        said["optim"] = run.optimizer
    if run.mesh:
        sizes = {f"{name}_size": size for name, size in run.mesh if name not in ("shard", "ring")}
        ring = {"cp_comm_strategy": "alltoall"} if "ring" in dict(run.mesh) else {}
        said |= {"parallelism_config": sizes | ring}
        said |= {"fsdp": "full_shard"} if "shard" in dict(run.mesh) else {}
        if "tp" in dict(run.mesh) and run.model == "mlp_even":
            said["tp_plan"] = {"first": "colwise_gather_output", "last": "rowwise_split_input"}
    said |= dict(run.options)
    if run.patience or run.best or run.schedule == "reduce_lr_on_plateau":
        said |= {"metric_for_best_model": "loss", "greater_is_better": False}
    return said


def _arguments(side, run, folder):
    args = side.arguments(**{**arguments_of(run, folder), **dict(run.assigned)})
    for name, value in assigned_to(run).items():
        setattr(args, name, value)
    return args


def assigned_to(run):
    """Return the values that are assigned to arguments after they were built with others."""
    said, known = arguments_of(run, ""), OURS.arguments.__dataclass_fields__
    return {name: said.get(name, known[name].default) for name, _ in run.assigned}


def class_of(side: Side, run: Run):
    """Return the Trainer's class, or the subclass that a run needs."""
    methods = {}
    if run.loss in OVERRIDES:
        methods["compute_loss"] = override_of(run)
    if run.loader != "trainer":
        methods["get_train_dataloader"] = lambda self: own_loader(run, self.train_dataset)
    if run.optimizer in ("created", "groups"):

        def create_optimizer(self, model=None):
            if self.optimizer is None:
                self.optimizer = optimizer_of(run, self.model)
            return self.optimizer

        methods["create_optimizer"] = create_optimizer
    return type("Own", (side.trainer,), methods) if methods else side.trainer


def build(side: Side, run: Run, folder, callbacks=()):
    """Return a Trainer for a run, and what will be seen of it."""
    model, trace, options = model_of(run.model), Trace(), {}
    trace.watch(model)
    if run.optimizer in ("given", "given_both"):
        optimizer = optimizer_of(run, model)
        both = run.optimizer == "given_both"
        options["optimizers"] = (optimizer, schedule_of(run, optimizer, run.steps) if both else None)
    if run.optimizer == "class":
        options["optimizer_cls_and_kwargs"] = (torch.optim.SGD, {"lr": run.rate, "momentum": 0.9})
    recorder = Recorder()
    trace.events = recorder.events
    stops = [side.early_stopping(run.patience)] if run.patience else []
    trainer = class_of(side, run)(
        model,
        _arguments(side, run, folder),
        data_collator=stack,
        train_dataset=training_data(run),
        eval_dataset=evaluation_data(run),
        compute_metrics=figures if run.metrics else None,
        compute_loss_func=function_of(run),
        callbacks=[*stops, *callbacks, recorder],
        **options,
    )
    trainer.remove_callback(side.printer)
    return trainer, trace


def train(side: Side, run: Run, folder, habits, resume=None, closes=False):
    """Train a run and return what is seen; an exception is noted too.

    Args:
        side: which Trainer.
        run: what to train.
        folder: where it may write.
        habits: a callback that acts as the user does; `before` and `after` surround the training.
        resume: what to go on from.
        closes: whether this is a rank, which leaves the others at the end.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore" if side is REFERENCE else "error")
        trace = Trace()
        try:
            trainer, trace = build(side, run, folder, [habits])
            habits.before(trainer)
            for _ in range(1 + run.twice):
                trainer.train(resume_from_checkpoint=resume)
            if run.around == "after":
                trainer.evaluate()
            if run.around == "predict":
                trace.predictions = torch.as_tensor(trainer.predict(evaluation_data(run)).predictions)
        except (Exception, KeyboardInterrupt, SystemExit) as error:
            if not isinstance(error, Exception) and not run.stops:
                raise
            trace.error = error
            return trace
        trace.take(trainer.state.log_history)
        trace.arguments = {**trainer.args.to_dict(), "output_dir": ""}
        trace.finish(trainer.model, getattr(trainer.optimizer, "optimizer", trainer.optimizer))
        if run.mesh:
            trace.weights = trainer.strategy.full_state_dict(trainer.model_wrapped)
        if closes:
            trainer.strategy.close()
        return trace


def settle():
    """Spare the collector all that is imported: transformers calls it at the start of every run."""
    gc.collect()
    gc.freeze()
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
