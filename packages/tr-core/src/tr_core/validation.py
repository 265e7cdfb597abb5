"""Refuse before training starts what cannot work."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from tr_args import TrainingArguments
from tr_args.constraints import Only
from tr_args.fields.evaluation import EvaluationFields
from tr_args.fields.saving import SavingFields
from tr_args.fields.training import DataFields, OptimizerFields
from tr_args.schema import facts_of_kind
from tr_core.batch_size_search import check_batch_size_search
from tr_core.data.sampler import has_length
from tr_core.evaluation.metrics import check_streaming, is_streaming
from tr_core.model_io import base_model, forward_parameters
from tr_core.plan import check_accelerator_config
from tr_core.protocols import Checkpointer, Strategy
from tr_core.runtime.run_context import check_conditions
from tr_core.signatures import takes_argument


def refuse_unsupported(args: TrainingArguments) -> None:
    """Raise for arguments of which only one value is supported."""
    supported = facts_of_kind(type(args), Only)
    values = {name: (getattr(args, name), only) for name, only in supported.items()}
    problems = [f"  {name}={value!r}: {only.reason}" for name, (value, only) in values.items() if value != only.value]
    if problems:
        raise ValueError("options that cannot be used, and why:\n" + "\n".join(problems))


def check_model(model: Any, model_init: Any) -> None:
    """Raise unless the user passed exactly one of a model and a function that builds one."""
    if model is None and model_init is None:
        raise ValueError("Trainer needs a model or a model_init; both are None")
    if model is not None and model_init is not None:
        raise ValueError("Trainer was given a model and a model_init; pass one of them")
    if model is not None and not isinstance(model, nn.Module):
        if isinstance(model, type):
            raise TypeError(
                f"model is the class {model.__name__}: pass an instance, {model.__name__}(...), or model_init"
            )
        raise TypeError(f"model is a {type(model).__name__}; Trainer trains a torch.nn.Module")
    if model is not None and "_orig_mod" in model._modules:
        raise ValueError(
            "model is what torch.compile() returned, whose weights have other names than those of the model in it; "
            "pass the model, and set torch_compile=True"
        )


def check_quantized(model: nn.Module) -> None:
    """Raise if a model's weights are quantized, so that training would change little but its norms."""
    quantizer = getattr(model, "hf_quantizer", None)
    if not getattr(model, "is_quantized", False) or getattr(model, "_hf_peft_config_loaded", False):
        return
    name, method = type(model).__name__, getattr(getattr(quantizer, "quantization_config", None), "quant_method", None)
    shown = "" if method is None else f" by {getattr(method, 'value', method)}"
    # Every form of PEFT's wrappers has `peft_config`.
    if not hasattr(model, "peft_config") and not getattr(quantizer, "is_qat_trainable", False):
        trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
        raise ValueError(
            f"{name} is quantized{shown} and has no adapter: its quantized weights cannot be trained, only "
            f"{trainable:,} numbers beside them; add an adapter, as with peft.get_peft_model, or load the model "
            "without quantization"
        )
    if not getattr(quantizer, "is_trainable", False):
        raise ValueError(
            f"{name} is quantized{shown}, which cannot be trained, not even with an adapter; load it without "
            "quantization, or with one that can, as bitsandbytes in 4 bits"
        )


def check_args(args: object) -> None:
    """Raise unless arguments are from tr-args or None: half-ported scripts pass those of another library."""
    if args is None or isinstance(args, TrainingArguments):
        return
    kind = type(args)
    if isinstance(args, dict):
        raise TypeError("args is a dict; Trainer takes TrainingArguments: pass TrainingArguments(**args)")
    raise TypeError(
        f"args is a {kind.__module__}.{kind.__qualname__}; Trainer takes the TrainingArguments of tr_args, which "
        "tr_all and tr_core give too: import them from there"
    )


def check_given_optimizers(args: OptimizerFields, optimizers: Any, cls_and_kwargs: Any, model_init: Any) -> None:
    """Raise if the user passed an optimizer together with arguments that would build or need another one."""
    if not isinstance(optimizers, tuple | list) or len(optimizers) != 2:
        raise TypeError(
            f"optimizers is {type(optimizers).__name__}; it must be a pair of an optimizer and a schedule, of which "
            "None has the arguments decide: optimizers=(optimizer, None)"
        )
    if optimizers[0] is not None and cls_and_kwargs is not None:
        raise ValueError("Trainer was given an optimizer and optimizer_cls_and_kwargs; pass one of them")
    if any(part is not None for part in optimizers) and model_init is not None:
        raise ValueError(
            "Trainer was given optimizers and a model_init: every run makes a new model, whose parameters they do not "
            "have; pass optimizer_cls_and_kwargs, or override create_optimizer and create_scheduler"
        )
    if optimizers[0] is not None and args.parameter_rules:
        raise ValueError(
            "parameter_rules has no effect on an optimizer that is given; leave one of them out, or pass "
            "optimizer_cls_and_kwargs"
        )


def check_given_parts_fit(model: nn.Module | None, optimizer: Any, schedule: Any) -> None:
    """Raise if an optimizer trains another model, or a schedule sets the rates of another optimizer."""
    scheduled: Any = getattr(schedule, "optimizer", None)
    if scheduled is not None and optimizer is None:
        raise ValueError(
            f"Trainer was given a schedule ({type(schedule).__name__}) without the optimizer whose rates it sets, and "
            "would build another one, on which it had no effect; pass both: optimizers=(schedule.optimizer, schedule)"
        )
    if optimizer is None:
        return
    groups: list[dict[str, Any]] = list(getattr(optimizer, "param_groups", []))
    own = {id(group) for group in groups}
    if scheduled is not None and not any(id(group) in own for group in scheduled.param_groups):
        raise ValueError(
            f"the schedule that was given ({type(schedule).__name__}) sets the rates of another optimizer than the one "
            f"that was given ({type(optimizer).__name__}), on which it had no effect; build the schedule with this "
            "optimizer"
        )
    if model is None:
        return
    of_model = {id(parameter) for parameter in model.parameters()}
    if groups and not any(id(parameter) in of_model for group in groups for parameter in group["params"]):
        raise ValueError(
            f"no parameter of the optimizer that was given ({type(optimizer).__name__}) is one of the model's, so that "
            "nothing of the model would be trained; build it with the parameters of the very model that the Trainer is "
            "given"
        )


_ROWS = "turn columns into rows, as datasets.Dataset.from_dict(columns) does"


def check_data(
    args: TrainingArguments, model: nn.Module, train_dataset: Any, eval_dataset: Any, overrides: Callable[..., bool]
) -> None:
    """Raise if arguments need data that the Trainer did not get: a late failure would waste hours."""
    evaluates_other_data = args.eval_strategy != "no" and args.overfit_batches is None
    if evaluates_other_data and eval_dataset is None and not overrides("get_eval_dataloader"):
        raise ValueError(
            f"eval_strategy={str(args.eval_strategy)!r} evaluates during training, but eval_dataset is None; pass "
            "eval_dataset or set eval_strategy='no'"
        )
    if isinstance(eval_dataset, dict) and eval_dataset and set(eval_dataset) <= {*forward_parameters(model), "label"}:
        raise TypeError(
            f"eval_dataset is a dict of {sorted(eval_dataset)}, which the model takes as columns, and a dict holds "
            f"data sets by name: {_ROWS}, or give the data sets other names"
        )
    if train_dataset is None or overrides("get_train_dataloader"):
        return
    check_one_data_set(train_dataset, "train", "training")
    if not has_length(train_dataset) and args.max_steps <= 0:
        raise ValueError(
            f"train_dataset ({type(train_dataset).__name__}) has no length and max_steps={args.max_steps}; set "
            "max_steps to the number of optimizer steps to train"
        )


def check_one_data_set(dataset: Any, name: str, user: str) -> None:
    """Raise unless what `user` takes, such as training, is one data set; `name` is that of a split."""
    if dataset is None:
        raise TypeError(f"{name}_dataset is None, and {user} takes a data set")
    if isinstance(dataset, dict):
        raise TypeError(
            f"{name}_dataset is a dict of {sorted(map(str, dataset))}; {user} takes one data set: pass one of them, as "
            f"in {name}_dataset=data['{name}'], or {_ROWS}"
        )


def check_casts(args: TrainingArguments, strategy: Strategy) -> None:
    """Raise if whole weights are to be cast for evaluations, and no process holds them."""
    casts = [name for name in ("bf16_full_eval", "fp16_full_eval") if getattr(args, name)]
    if casts and strategy.forward_is_collective:
        raise ValueError(
            f"{casts[0]} casts whole weights, and {type(strategy).__name__} divides them over processes; leave it out, "
            "and compute in bf16=True, or evaluate the saved model in one process"
        )


def check_options(args: TrainingArguments, strategy: Strategy) -> None:
    """Raise for options that do not suit the device, the number of processes, or one another."""
    check_casts(args, strategy)
    check_conditions(args, strategy.device)
    check_accelerator_config(args, strategy.world_size)
    check_batch_size_search(args)


def check_label_names(args: DataFields, model: nn.Module, has_loss_function: bool, computes_loss: bool) -> None:
    """Raise if `label_names` names inputs that the model does not take: training would fail late, or without a loss."""
    names, base = args.label_names or [], base_model(model)
    taken_out = ["labels"] if has_loss_function else []
    unknown = [name for name in names if name not in taken_out and not takes_argument(base.forward, name)]
    if unknown and not computes_loss:
        raise ValueError(
            f"label_names={names}, but the forward of {type(base).__name__} takes no {', '.join(map(repr, unknown))}, "
            f"only {list(forward_parameters(base))}; leave label_names out, or name arguments of the forward, or "
            "override compute_loss and take those labels out of the inputs there"
        )


def check_evaluation(args: EvaluationFields, model: nn.Module, compute_metrics: Any, counts_targets: bool) -> None:
    """Raise if `compute_metrics` or the model cannot return what the arguments request of an evaluation."""
    if compute_metrics is not None:
        _check_metrics(args, compute_metrics)
    if args.eval_perplexity and not counts_targets:
        raise ValueError(
            f"eval_perplexity=True needs a mean over tokens, but the loss of {type(model).__name__} is one "
            "over each batch, whatever its tokens: its forward, or compute_loss_func, must take num_items_in_batch and "
            "divide the summed loss by it; or set eval_perplexity=False"
        )


def _check_metrics(args: EvaluationFields, compute: Any) -> None:
    if is_streaming(compute):
        check_streaming(compute)
        if args.batch_eval_metrics:
            raise ValueError(
                "batch_eval_metrics=True calls compute_metrics as a function, but it is a metric with update, which "
                "sees every batch anyway; set batch_eval_metrics=False"
            )
        if args.include_for_metrics:
            raise ValueError(
                f"include_for_metrics={args.include_for_metrics} is for a function that gets an EvalPrediction, but "
                "compute_metrics is a metric with update(preds, target); set include_for_metrics=[]"
            )
    elif not callable(compute):
        raise TypeError(
            f"compute_metrics is a {type(compute).__name__}; it must be a function of an EvalPrediction, an object "
            "with update, compute and reset, or a dict of such objects"
        )
    elif args.batch_eval_metrics and not takes_argument(compute, "compute_result"):
        raise ValueError(
            "batch_eval_metrics=True calls compute_metrics(prediction, compute_result=bool) after every batch, but "
            "compute_metrics takes no compute_result"
        )


def check_output_dir(args: SavingFields, folder: str | Path, strategy: Strategy) -> None:
    """Refuse on all ranks an `output_dir` where the first save would fail."""
    if args.save_strategy == "no":
        return
    writes = strategy.rank == 0 or (args.save_on_each_node and strategy.local_rank == 0)
    own = why_not_writable(Path(folder).absolute()) if writes else ""
    if found := next(filter(None, strategy.gather_objects(own)), ""):
        raise ValueError(f"{found}; save_strategy='no' trains without checkpoints")


def lock_output_dir(checkpointer: Checkpointer) -> None:
    """Lock the folder of a checkpointer against other runs, if it can, until it is unlocked.

    Raises:
        OSError: another run saves there, or this cannot be determined.
    """
    if (claim := getattr(checkpointer, "claim", None)) is not None:
        claim()


@contextmanager
def unlocking_output_dir(current: Callable[[], Checkpointer | None]) -> Iterator[None]:
    """Unlock the folder for other runs when the block ends, also after an exception.

    A callback may save in a run without planned saves: the checkpointer is asked for at the end.
    """
    try:
        yield
    finally:
        release = getattr(current(), "release", None)
        if release is not None:
            release()


def why_not_writable(folder: Path) -> str:
    """Return why a folder cannot be created or written to, and what to change; empty if it can."""
    existing = nearest_existing_path(folder)
    if not existing.is_dir():
        return f"output_dir={str(folder)!r} cannot be made: {existing} is a file; give another folder, or move the file"
    if not os.access(existing, os.W_OK | os.X_OK):
        return (
            f"output_dir={str(folder)!r} cannot be written to: this user may not write to {existing}; give another "
            "folder, or the right to write there"
        )
    return ""


def nearest_existing_path(folder: Path) -> Path:
    """Return the path itself, or the nearest one above it that exists."""
    return next(path for path in (folder, *folder.parents) if os.path.lexists(path))
