"""State at a field, in `Annotated`, which values it takes, and what it changes.

`Annotated[int, AtLeast(1)]` is a whole number from 1. A constraint may rewrite a value before it is converted to the
type (`before`). It may check or rewrite it after that (`after`). None is not passed to `after`: the type decides
whether None is allowed. After the constraints are the types that several fields share.

`Annotated[Beta, Numbers.OPTIMIZER]` changes options of the optimizer. Code that treats some arguments differently gets
their names from `tr_args.schema.facts`. So it needs no list of names.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated, Any

from tr_args.errors import NOTHING, RefusedError

NOT_UTF_8 = "needs a path that is UTF-8 text: what checkpoints are read with opens no other; rename the folder"


class Constraint:
    """What a value must be beyond its type.

    Attributes:
        bare: value of a command-line flag without a value; `NOTHING` if it needs one.
        separator: text that joins several words of a command line for `before`; None leaves them a list.
        secret: whether the value must never be shown.
    """

    bare: Any = NOTHING
    separator: str | None = None
    secret = False

    def before(self, value: Any) -> Any:
        """Return the value to convert to the type."""
        return value

    def after(self, value: Any) -> Any:
        """Return the checked value, or raise `RefusedError` with what is needed."""
        return value


@dataclass(frozen=True)
class AtLeast(Constraint):
    """A finite number from `low` on; `or_else` names what to give instead of smaller ones."""

    low: float
    or_else: str = ""

    def after(self, value: Any) -> Any:
        """Return `value` if it is finite and large enough."""
        if value == math.inf:
            raise RefusedError("needs a finite number")
        if value < self.low:
            raise RefusedError(f"needs at least {self.low}{self.or_else}")
        return value


@dataclass(frozen=True)
class Above(Constraint):
    """A finite number larger than `low`."""

    low: float

    def after(self, value: Any) -> Any:
        """Return `value` if it is finite and larger."""
        if value == math.inf:
            raise RefusedError("needs a finite number")
        if value <= self.low:
            raise RefusedError(f"needs a number above {self.low}")
        return value


@dataclass(frozen=True)
class Between(Constraint):
    """A number from `low` to `high`; `open_start` excludes `low`, `open_end` excludes `high`."""

    low: float
    high: float
    open_end: bool = False
    open_start: bool = False

    def after(self, value: Any) -> Any:
        """Return `value` if it lies inside."""
        on_edge = (self.open_end and value == self.high) or (self.open_start and value == self.low)
        if on_edge or not (self.low <= value <= self.high):
            start = "above" if self.open_start else "from"
            end = ("and below" if self.open_start else "below") if self.open_end else "to"
            raise RefusedError(f"needs a number {start} {self.low} {end} {self.high}")
        return value


@dataclass(frozen=True)
class Exactly(Constraint):
    """A list of `count` values."""

    count: int

    def after(self, value: Any) -> Any:
        """Return `value` if it has that many."""
        if len(value) != self.count:
            raise RefusedError(f"needs {self.count} values, not {len(value)}")
        return value


@dataclass(frozen=True)
class StepsOrRatio(Constraint):
    """A whole number of steps, or a share of all steps below 1; whole numbers are returned as int."""

    def after(self, value: Any) -> Any:
        """Return the steps as int, or the share as float."""
        if not 0 <= value < math.inf or (value > 1 and value != int(value)):
            raise RefusedError("needs a whole number of steps, or a ratio below 1 of all steps")
        return value if 0 < value < 1 else int(value)


@dataclass(frozen=True)
class BatchesOrShare(Constraint):
    """A whole number of batches from 1, or a share of the data below 1; whole numbers are returned as int."""

    def after(self, value: Any) -> Any:
        """Return the batches as int, or the share as float."""
        if not 0 < value < math.inf or (value > 1 and value != int(value)):
            raise RefusedError("needs a whole number of batches from 1, or a share above 0 and below 1 of the data")
        return value if value < 1 else int(value)


@dataclass(frozen=True)
class MaxSteps(Constraint):
    """-1, or a whole number of steps from 1."""

    def after(self, value: Any) -> Any:
        """Return `value` if it is -1 or positive."""
        if value != -1 and value < 1:
            raise RefusedError("needs at least 1, or -1 to train for num_train_epochs")
        return value


@dataclass(frozen=True)
class CommaSeparated(Constraint):
    """A list that may be given as text with commas.

    Attributes:
        nothing: a word that means the empty list.
        unset: the value that replaces None; by default the empty list.
    """

    nothing: str = ""
    unset: list[str] | None = field(default_factory=list)
    separator = ","

    def before(self, value: Any) -> Any:
        """Return the list of words; text that is a JSON list is left to the conversion."""
        if value is None:
            return self.unset if self.unset is None else list(self.unset)
        if isinstance(value, str):
            if value.lstrip().startswith("["):
                return value
            value = [word.strip() for word in value.split(",") if word.strip()]
        if isinstance(value, (list, tuple, set)) and self.nothing and self.nothing in value:
            if len(value) > 1:
                raise RefusedError(f"needs either {self.nothing!r} or names, not both")
            return []
        return value


@dataclass(frozen=True)
class UserPath(Constraint):
    """A path in which `~` is the user's home; values that are not text are accepted as they are.

    Attributes:
        none: the path that None selects; None if None is not a special value.
    """

    none: str | None = None

    def before(self, value: Any) -> Any:
        """Return the path that None selects."""
        return self.none if value is None else value

    def after(self, value: Any) -> Any:
        """Return the path with `~` expanded."""
        if value == "" or (isinstance(value, str) and "\0" in value):
            raise RefusedError("needs a path")
        return _utf_8(os.path.expanduser(value)) if isinstance(value, str) else value


def _utf_8(path: str) -> str:
    try:
        path.encode()
    except UnicodeEncodeError:
        raise RefusedError(NOT_UTF_8) from None
    return path


@dataclass(frozen=True)
class Secret(Constraint):
    """A value that is never written to a message, file or log."""

    secret = True


class Name(str):
    """Free text with the attributes of a member of an enum: there are names besides those that a list would have."""

    __slots__ = ()

    @property
    def value(self) -> str:
        """The text."""
        return str(self)

    @property
    def name(self) -> str:
        """The text in capitals."""
        return self.upper()


class FreeName(Constraint):
    """Text that has `value` and `name`, as members of an enum have."""

    def after(self, value: Any) -> Any:
        """Return the name."""
        return Name(value)


@dataclass(frozen=True)
class RepositoryName(Constraint):
    """The name of a repository, `owner/name` or `name`. Addresses are refused, because they may hold a token."""

    def after(self, value: Any) -> Any:
        """Return `value` if it is not an address."""
        if "://" in value or "@" in value:
            raise RefusedError("needs owner/name, not an address; give a token as hub_token or HF_TOKEN")
        return value


class BoolOrInt(Constraint):
    """True, false, or a whole number from 1; 0 is false."""

    def after(self, value: Any) -> Any:
        """Return `value` if it is one of these."""
        if value < 0:
            raise RefusedError("needs true, false or a number from 1")
        return value if value else False


Count = Annotated[int, AtLeast(1)]
OptionalCount = Annotated[int | None, AtLeast(1)]
NonNegativeInt = Annotated[int, AtLeast(0)]
NonNegative = Annotated[float, AtLeast(0)]
Beta = Annotated[float, Between(0, 1, open_end=True)]
Seed = Annotated[int, Between(0, 2**32 - 1)]
OptionalSeed = Annotated[int | None, Between(0, 2**32 - 1)]
Steps = Annotated[float, StepsOrRatio()]
OptionalSteps = Annotated[float | None, StepsOrRatio()]
Names = Annotated[list[str], CommaSeparated()]
OptionalPath = Annotated[str | None, UserPath()]
Options = dict[str, Any] | None


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


class Later(Fact, Enum):
    """When a new value acts that is assigned once a Trainer was built with the arguments.

    A run takes an argument without this fact when it begins, and refuses a new value in its middle.
    """

    NEXT_STEP = "acts from the next step"
    NEXT_EVALUATION = "acts at the next evaluation or prediction"
    NEXT_SAVE = "acts at the next save"
    END_OF_RUN = "acts at the end of the run"
    NEXT_RUN = "acts when the next run begins"
    NEW_TRAINER = "refused once a Trainer was built with it"
    """The Trainer makes its parts of it. A trial of a hyper-parameter search cannot set it."""


@dataclass(frozen=True)
class GroupOption(Fact):
    """The option of the optimizer's parameter groups that the argument sets. An argument without one may set any."""

    name: str


@dataclass(frozen=True)
class Only(Fact):
    """The only value a Trainer accepts, and the reason why it refuses others."""

    value: Any
    reason: str
