"""State at a field what a training argument changes: `Annotated[Beta, Numbers.OPTIMIZER]`.

Code that treats some arguments differently gets their names from `tr_args.schema.facts`. So it needs no list of names.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any


class Fact:
    """A statement about a field. It neither checks nor converts values.

    A subclass that declares the field again keeps the statement.
    """


class Numbers(Fact, Enum):
    """What changes in a resumed run if the argument has another value. Every training argument states one."""

    UNCHANGED = "unchanged"
    """No number of the run: neither weights nor losses."""

    OPTIMIZER = "optimizer"
    """Options of the optimizer's parameter groups."""

    SCHEDULE = "schedule"
    """The learning-rate schedule."""

    ORDER = "order"
    """The order of the training data, so it cannot change in the middle of an epoch."""

    METRIC = "metric"
    """The metric that tells which model is best."""

    OTHER = "other"
    """Anything else."""


class Set(Fact, Enum):
    """When the argument must be set."""

    AT_CONSTRUCTION = "at construction"
    """Before a Trainer is built. A trial of a hyper-parameter search cannot set it."""


@dataclass(frozen=True)
class GroupOption(Fact):
    """The option of the optimizer's parameter groups that the argument sets. An argument without one may set any."""

    name: str


@dataclass(frozen=True)
class Only(Fact):
    """The only value a Trainer accepts, and the reason why it refuses others."""

    value: Any
    reason: str
