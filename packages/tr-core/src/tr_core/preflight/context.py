"""Store the target of a preflight, what is found, and the results of checks that later checks need."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

from tr_core.plugins import PluginError
from tr_core.preflight.origins import Origins, last_line, raised_at
from tr_core.preflight.report import Problem
from tr_core.trainer_methods import TrainerMethods

SAMPLES = 2
"""Number of samples in the trial of the model."""


@dataclass
class CheckContext:
    """The target and the results of a preflight.

    Attributes:
        given_trainer: the Trainer; None if only arguments are checked.
        origin: returns where an option was written.
        resume: the checkpoint to resume from, as given to `train` or in the arguments.
        trains: whether training would begin, so that there must be training data.
        ends_here: whether the process ends with the preflight, so that data may be used up.
        progress: called with a line of text before each slow check.
        inputs: a batch of two training samples, on the host; None if there is none.
        classes: number of classes that labels can name; None if unknown.
        gives_loss: whether the trial returned a loss with a gradient.
    """

    args: Any
    given_trainer: TrainerMethods | None = None
    origin: Origins = field(default_factory=Origins)
    resume: Any = None
    evaluation_data: Any = None
    trains: bool = True
    ends_here: bool = False
    progress: Callable[[str], None] = lambda text: None
    problems: list[Problem] = field(default_factory=list)
    callbacks: list[Any] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)
    steps: int | None = None
    epochs: int | None = None
    inputs: Any = None
    classes: int | None = None
    gives_loss: bool = False
    optimizer: Any = None

    @property
    def trainer(self) -> TrainerMethods:
        """The Trainer, for checks that run only with one."""
        return cast("TrainerMethods", self.given_trainer)

    def say(self, code: str, message: str, *options: str, at: str = "") -> None:
        """Add a problem, with the place where it was raised, or where these options were written."""
        places = dict.fromkeys(self.origin(name) for name in options)
        self.problems.append(Problem(code, message, at or ", ".join(p for p in places if p not in ("", "default"))))

    def say_error(self, code: str, what: str, error: BaseException) -> None:
        """Add a problem that is an exception."""
        self.say(code, f"{what}: {last_line(error)}", at=raised_at(error))

    @contextmanager
    def saying(self, code: str, *options: str, what: str = "") -> Iterator[None]:
        """Add a problem if the block refuses what the options ask for, or a package or library for it is missing."""
        try:
            yield
        except PluginError as error:
            self.say("T301", f"{what}{error}", *options)
        except ImportError as error:
            self.say("T302", f"{what}{error}", *options)
        except Exception as error:  # whatever a user's object raises
            text = str(error) if isinstance(error, ValueError | TypeError) else last_line(error)
            self.say(code, f"{what}{text}", *options, at=raised_at(error))

    def evaluation_sets(self) -> dict[str, Any]:
        """Return the evaluation data by the prefix of its metrics."""
        own: Any = None if self.given_trainer is None else self.given_trainer.eval_dataset
        data = own if self.evaluation_data is None else self.evaluation_data
        if isinstance(data, str):
            data = {data: own[data]}
        if isinstance(data, dict):
            return {f"eval_{name}": dataset for name, dataset in data.items()}
        return {} if data is None else {"eval": data}
