"""Name what a training argument changes, beside its type: `Annotated[Beta, Numbers.OPTIMIZER]` stands at its field.

Code that treats arguments differently asks `tr_args.schema.facts` for their names, so that it needs no list of them.
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
    """When the argument is read for the last time."""

    AT_CONSTRUCTION = "at construction"
    """When a Trainer is built, or the argument is set by a hyper-parameter search itself: a trial cannot set it."""


@dataclass(frozen=True)
class GroupOption(Fact):
    """The option of the optimizer's parameter groups that the argument sets; without one it may set any."""

    name: str


@dataclass(frozen=True)
class Only(Fact):
    """The only value a Trainer accepts, and the reason why it refuses others."""

    value: Any
    reason: str
