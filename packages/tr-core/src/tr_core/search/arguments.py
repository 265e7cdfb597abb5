"""Set the training arguments of a trial and restore them afterwards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from tr_args import TrainingArguments
from tr_args.aliases import aliases
from tr_args.checked import unknown_argument
from tr_args.constraints import Later
from tr_args.errors import ArgumentsError
from tr_args.schema import facts, schema


@contextmanager
def changed(args: TrainingArguments, values: Mapping[str, Any], output_dir: str) -> Iterator[None]:
    """Change arguments inside a block, and restore all arguments afterwards."""
    before = dict(vars(args))
    try:
        for name, value in values.items():
            setattr(args, name, value)
        args.output_dir = output_dir
        args.check()
        yield
    finally:
        vars(args).clear()
        vars(args).update(before)


_SET_BY_SEARCH = ("output_dir", "resume_from_checkpoint")


def converted(args: TrainingArguments, values: Any) -> dict[str, Any]:
    """Return a search space's values, converted to the types of the arguments; `args` do not change.

    Raises:
        ValueError: a name is not an argument, or one that a trial cannot set, or a value does not fit. The message
            lists all problems.
    """
    if not isinstance(values, Mapping):
        raise ValueError(
            f"hp_space returned {values!r}; it must return a dict of training arguments, such as "
            '{"learning_rate": trial.suggest_float("learning_rate", 1e-6, 1e-4, log=True)}'
        )
    kind = type(args)
    former, fixed = aliases(kind), {*facts(kind, Later.NEW_TRAINER), *_SET_BY_SEARCH}
    known = {*schema(kind), *former}
    problems = [unknown_argument(kind, name) for name in values if name not in known]
    problems += [
        f"{name} is fixed when the Trainer is built and cannot be searched"
        for name in values
        if (former[name].target if name in former else name) in fixed
    ]
    if problems:
        raise ValueError(f"hp_space: {'; '.join(problems)}")
    before = dict(vars(args))
    try:
        for name, value in values.items():
            setattr(args, name, value)
        return {name: getattr(args, name) for name in values}
    except ArgumentsError as error:
        raise ValueError(f"hp_space: {error}") from None
    finally:
        vars(args).clear()
        vars(args).update(before)


# Entries of an evaluation beside its metrics. The perplexity adds nothing to the loss.
_NOT_METRICS = ("_runtime", "_per_second", "_perplexity", "_model_preparation_time")


def default_compute_objective(metrics: Mapping[str, float]) -> float:
    """Return the sum of the metrics other than the loss, or the evaluation loss without any."""
    chosen = objective_names(metrics)
    return sum(metrics[name] for name in chosen)


def objective_names(metrics: Mapping[str, float]) -> list[str]:
    """Return the names of the metrics that `default_compute_objective` adds up."""
    own = [name for name in metrics if name not in ("eval_loss", "epoch") and not name.endswith(_NOT_METRICS)]
    return own or ["eval_loss"]


def default_hp_space(trial: Any) -> dict[str, Any]:
    """Search the learning rate (1e-6 to 1e-4), the epochs (1 to 5), the seed (1 to 40) and the batch size (4 to 64)."""
    return {
        "learning_rate": trial.suggest_float("learning_rate", 1e-6, 1e-4, log=True),
        "num_train_epochs": trial.suggest_int("num_train_epochs", 1, 5),
        "seed": trial.suggest_int("seed", 1, 40),
        "per_device_train_batch_size": trial.suggest_categorical("per_device_train_batch_size", [4, 8, 16, 32, 64]),
    }


def check_search(
    args: TrainingArguments,
    directions: list[str],
    n_trials: int,
    *,
    has_model_init: bool,
    has_eval_data: bool,
    has_own_checkpointer: bool,
) -> None:
    """Raise where a Trainer cannot make the runs of a hyper-parameter search."""
    if not has_model_init:
        raise ValueError("hyperparameter_search needs a new model for every trial; give the Trainer a model_init")
    if wrong := [direction for direction in directions if direction not in ("minimize", "maximize")]:
        raise ValueError(f"direction={wrong[0]!r} is not known; give minimize or maximize, or a list of them")
    if not directions or n_trials < 1:
        raise ValueError(f"direction={directions} and n_trials={n_trials}: there must be at least one of each")
    if not has_eval_data:
        raise ValueError("hyperparameter_search compares evaluations, but eval_dataset is None; give the Trainer one")
    if args.push_to_hub:
        raise ValueError(
            "push_to_hub=True would push every trial to one repository; set it to False, and push the best run later"
        )
    if args.resume_from_checkpoint:
        raise ValueError(
            f"resume_from_checkpoint={args.resume_from_checkpoint!r} would have every trial go on from one checkpoint; "
            "leave it out, and give hyperparameter_search resume=True to resume a search"
        )
    if has_own_checkpointer:
        raise ValueError(
            "the checkpointer that the Trainer was given has one folder for all trials; leave it out, so that each has "
            "its own"
        )
