"""Refuse, before the first trial, what a search cannot be made with."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tr_core.checks import overrides_eval

if TYPE_CHECKING:
    from tr_core.trainer import Trainer


def check_search(trainer: Trainer, directions: list[str], n_trials: int) -> None:
    """Raise where a Trainer cannot make the runs of a hyper-parameter search.

    Raises:
        ValueError: the message says what is missing or in the way.
    """
    args = trainer.args
    if trainer.model_init is None:
        raise ValueError("hyperparameter_search needs a new model for every trial; give the Trainer a model_init")
    if wrong := [direction for direction in directions if direction not in ("minimize", "maximize")]:
        raise ValueError(f"direction={wrong[0]!r} is not known; give minimize or maximize, or a list of them")
    if not directions or n_trials < 1:
        raise ValueError(f"direction={directions} and n_trials={n_trials}: there must be at least one of each")
    if trainer.eval_dataset is None and not overrides_eval(trainer):
        raise ValueError("hyperparameter_search compares evaluations, but eval_dataset is None; give the Trainer one")
    if args.push_to_hub:
        raise ValueError(
            "push_to_hub=True would push every trial to one repository; set it to False, and push the best run later"
        )
    if args.resume_from_checkpoint:
        raise ValueError(
            f"resume_from_checkpoint={args.resume_from_checkpoint!r} would have every trial go on from one checkpoint; "
            "leave it out, and give hyperparameter_search resume=True to go on with a search"
        )
    if trainer.has_own_checkpointer:
        raise ValueError(
            "the checkpointer that the Trainer was given has one folder for all trials; leave it out, so that each has "
            "its own"
        )
