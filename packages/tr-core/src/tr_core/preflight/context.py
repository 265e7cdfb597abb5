"""Store the target of a preflight, what is found, and the results of checks that later checks need."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

from tr_args import ArgumentsError
from tr_core.plugins import PluginError
from tr_core.preflight.diagnosis import Failure, diagnose
from tr_core.preflight.report import Problem, argument_problems, last_line, raised_at
from tr_core.trainer_methods import TrainerMethods
from tr_log import get_logger

logger = get_logger("tr_core.preflight")

SAMPLES = 2
"""Number of samples in the trial of the model."""


@dataclass
class CheckContext:
    """The target and the results of a preflight.

    Attributes:
        given_trainer: the Trainer; None if only arguments are checked.
        resume: the checkpoint to resume from, as given to `train` or in the arguments.
        trains: whether training would begin, and can.
        ends_here: whether the process ends with the preflight, so that data may be used up.
        callbacks: those of the Trainer, which are not called.
        checkpointer: that of the run; None if it saves nothing or the checkpointer is not installed.
        inputs: a batch of two training samples, on the host; None if there is none.
    """

    args: Any
    given_trainer: TrainerMethods | None = None
    resume: Any = None
    evaluation_data: Any = None
    trains: bool = True
    ends_here: bool = False
    problems: list[Problem] = field(default_factory=list)
    callbacks: list[Any] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)
    steps: int | None = None
    epochs: int | None = None
    checkpointer: Any = None
    inputs: Any = None

    @property
    def trainer(self) -> TrainerMethods:
        """The Trainer, for checks that run only with one."""
        return cast("TrainerMethods", self.given_trainer)

    @property
    def resumes(self) -> bool:
        """Whether the run begins from a checkpoint."""
        return self.resume not in (None, False)

    def say(self, code: str, message: str, *options: str, at: str = "") -> None:
        """Add a problem, with the place where it was raised, or these options and what gave them."""
        given = {name: self.args.origin(name) for name in options}
        places = [f"{name} ({origin})" for name, origin in given.items() if origin != "default"]
        self.problems.append(Problem(code, message, at or ", ".join(places)))

    def say_why(self, error: Exception, data: Any, code: str, fails: str) -> None:
        """Add what is wrong with a micro-batch that an exception stopped, or where nothing tells, what fails."""
        code, why = diagnose(Failure(error, self.trainer, data)) or (code, fails)
        self.say(code, f"{why}: {last_line(error)}", at=raised_at(error))
        self.trainer.scope.inputs = None

    @contextmanager
    def saying(self, code: str, *options: str, what: str = "") -> Iterator[None]:
        """Add a problem if the block refuses what the options ask for, or a package or library for it is missing."""
        try:
            yield
        except ArgumentsError as error:
            self.problems += argument_problems(error)
        except Exception as error:  # whatever a user's object raises
            code = "T301" if isinstance(error, PluginError) else "T302" if isinstance(error, ImportError) else code
            text = str(error) if isinstance(error, ValueError | TypeError | ImportError) else last_line(error)
            self.say(code, f"{what}{text}", *options, at=raised_at(error))

    def evaluation_sets(self) -> dict[str, Any]:
        """Return the evaluation data by the prefix of its metrics."""
        own: Any = self.trainer.eval_dataset
        data = own if self.evaluation_data is None else self.evaluation_data
        if isinstance(data, str):
            data = {data: own[data]}
        if isinstance(data, dict):
            return {f"eval_{name}": dataset for name, dataset in data.items()}
        return {} if data is None else {"eval": data}
