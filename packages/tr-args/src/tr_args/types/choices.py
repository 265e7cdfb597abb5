"""Choose when something happens, and what is counted: words, durations such as `10min` or `2h30min`, truth values.

Each choice compares equal to its plain string. A duration is text that also gives its length in seconds, and a range of
steps such as `10:15` is text that also gives its first and its last one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, ClassVar

from tr_args.constraints import Constraint
from tr_args.conversion import FALSE_WORDS, TRUE_WORDS
from tr_args.errors import RefusedError, did_you_mean


class IntervalStrategy(StrEnum):
    """When to log or to evaluate."""

    NO = "no"
    STEPS = "steps"
    EPOCH = "epoch"


class SaveStrategy(StrEnum):
    """When to write a checkpoint; `best` writes one whenever the watched metric improves."""

    NO = "no"
    STEPS = "steps"
    EPOCH = "epoch"
    BEST = "best"


class MetricSchedule(StrEnum):
    """The values of `lr_scheduler_type` that follow the watched metric. Others are functions of the step."""

    PLATEAU = "reduce_lr_on_plateau"
    GREEDY = "greedy"


class HubStrategy(StrEnum):
    """What to upload, and when."""

    END = "end"
    EVERY_SAVE = "every_save"
    CHECKPOINT = "checkpoint"
    ALL_CHECKPOINTS = "all_checkpoints"


class ParallelMode(StrEnum):
    """How this process takes part in training."""

    NOT_PARALLEL = "not_parallel"
    NOT_DISTRIBUTED = "not_distributed"
    DISTRIBUTED = "distributed"
    TPU = "tpu"


_NUMBER = r"(\d+(?:\.\d+)?)\s*"
# Seconds of each unit, with its spellings, from the longest to the shortest: the order in which they are written.
_UNITS = (
    (86_400, r"d|days?"),
    (3_600, r"h|hrs?|hours?"),
    (60, r"m|mins?|minutes?"),
    (1, r"s|secs?|seconds?"),
)
_DURATION = re.compile(
    r"\s*".join(rf"(?:{_NUMBER}(?:{spellings}))?" for _, spellings in _UNITS), flags=re.ASCII | re.IGNORECASE
)
_NEEDED = "needs a duration such as 90s, 10min, 1.5h or 2h30min"


class Duration(str):
    """A length of time. It compares equal to its text, and is written as that.

    Units are d, h, min (or m) and s, or their full names, each at most once and longer ones first. Numbers may have a
    fraction.

    Raises:
        RefusedError: (a ValueError) the text is no time above 0, or has no unit.
    """

    __slots__ = ()

    metavar: ClassVar[str] = "DURATION"

    def __new__(cls, text: str) -> Duration:
        """Check the text; spaces around it are dropped."""
        text = text.strip()
        if _seconds(text) <= 0:
            raise RefusedError(f"{_NEEDED}, longer than 0")
        return super().__new__(cls, text)

    @property
    def seconds(self) -> float:
        """How long it is, in seconds."""
        return _seconds(self)


@dataclass(frozen=True)
class WallTime(Constraint):
    """A duration, or one of `choices`; a word that is both is a choice."""

    choices: type[StrEnum] | None = None

    def before(self, value: Any) -> Any:
        """Return the duration, the choice, or None."""
        if value is None or isinstance(value, Duration):
            return value
        if isinstance(value, int | float) and not isinstance(value, bool):
            raise RefusedError(self._without_unit(value))
        choice = self._choice(value)
        if choice is not None:
            return choice
        if isinstance(value, str):
            text = value.strip()
            if self.choices is None and text.lower() in ("none", "null"):
                return None
            if re.fullmatch(r"[\d.]+", text):
                raise RefusedError(self._without_unit(text))
            if self.choices is None or text[:1].isdigit():
                return Duration(text)
        if self.choices is None:
            raise RefusedError(_NEEDED)
        words = [choice.value for choice in self.choices]
        meant = did_you_mean(str(value).lower(), words)
        raise RefusedError(f"needs one of {', '.join(words)}, or a duration such as 10min{meant}")

    def _choice(self, value: Any) -> StrEnum | None:
        # YAML 1.1 reads a plain `no` as false.
        word = "no" if value is False else getattr(value, "value", value)
        if self.choices is None or not isinstance(word, str):
            return None
        return next((choice for choice in self.choices if choice.value == word.strip().lower()), None)

    def _without_unit(self, number: Any) -> str:
        steps = "" if self.choices is None else "; a number of steps goes into eval_steps, logging_steps or save_steps"
        return f"needs a unit, such as {number}s, {number}min or {number}h{steps}"


Intervals = Annotated[IntervalStrategy | Duration, WallTime(IntervalStrategy)]
SaveIntervals = Annotated[SaveStrategy | Duration, WallTime(SaveStrategy)]


def _seconds(text: str) -> float:
    match = _DURATION.fullmatch(text)
    if match is None:
        raise RefusedError(_NEEDED)
    return sum(float(number) * size for number, (size, _) in zip(match.groups(), _UNITS, strict=True) if number)


class StepRange(str):
    """Consecutive optimizer steps, counted from 1: `10:15` are six of them, `10` is one. It compares equal to its text.

    Raises:
        RefusedError: (a ValueError) the text is not a step from 1, and no two of them in their order.
    """

    __slots__ = ()

    metavar: ClassVar[str] = "FIRST:LAST"

    def __new__(cls, text: str) -> StepRange:
        """Check the text; spaces are dropped."""
        text = "".join(text.split())
        if not re.fullmatch(r"[0-9]{1,18}(:[0-9]{1,18})?", text):
            raise RefusedError("needs one step such as 10, or the first and the last of several, such as 10:15")
        made = super().__new__(cls, text)
        if made.first < 1:
            raise RefusedError("needs steps from 1: the first step of a run is 1")
        if made.last < made.first:
            raise RefusedError(f"needs the first step before the last, as in {made.last}:{made.first}")
        return made

    @property
    def first(self) -> int:
        """The first step."""
        return int(self.partition(":")[0])

    @property
    def last(self) -> int:
        """The last step; a single step is both."""
        return int(self.rpartition(":")[2])


class ConsecutiveSteps(Constraint):
    """A range of steps, as text or as the number of one step."""

    def before(self, value: Any) -> Any:
        """Return the range, or None."""
        if value is None or isinstance(value, StepRange):
            return value
        if isinstance(value, str) and value.strip().lower() in ("none", "null"):
            return None
        if isinstance(value, bool) or not isinstance(value, int | str):
            raise RefusedError("needs one step such as 10, or the first and the last of several, such as '10:15'")
        return StepRange(str(value))


class TokenCounting(Constraint):
    """A choice that may also be given as a truth value: true counts all tokens, false none."""

    bare = "all"

    def before(self, value: Any) -> Any:
        """Return the choice that a truth value stands for."""
        word = str(value).lower()
        if word in TRUE_WORDS:
            return "all"
        return "no" if word in FALSE_WORDS else value
