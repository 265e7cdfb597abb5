"""Report the results of a preflight: problems with stable codes, and figures."""

from __future__ import annotations

import json
import os
import re
import textwrap
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, NamedTuple

from tr_args import ArgumentsError
from tr_log.formatting import size
from tr_log.masking import mask_secrets

Severity = Literal["error", "warning", "info"]


class Code(NamedTuple):
    """A kind of problem.

    Attributes:
        severity: `error` stops the run or spoils it; `warning` is most likely unintended; `info` informs only.
    """

    severity: Severity
    meaning: str


CODES: dict[str, Code] = {
    # Options, and building a Trainer
    "T001": Code("error", "an option is unknown"),
    "T002": Code("error", "an option does not take the value"),
    "T003": Code("error", "options contradict each other"),
    "T004": Code("error", "the configuration file or the command line cannot be read"),
    "T005": Code("error", "the script failed, or a Trainer refused what it was given, before training began"),
    "T006": Code("error", "the script ended without training, evaluating or predicting with a Trainer"),
    "T007": Code("error", "this version does not act on an option"),
    "T010": Code("info", "something cannot be known from a configuration file alone"),
    "T011": Code("error", "the script began to train with a loop of its own"),
    "T012": Code("info", "a check could not be made"),
    # Length and events of the run
    "T101": Code("error", "the training data is missing, gives no batch or fails, or the length of the run is unknown"),
    "T103": Code("error", "no evaluation takes place"),
    "T104": Code("warning", "the only evaluation is that of the last step"),
    "T105": Code("error", "the warmup is not shorter than the run"),
    "T106": Code("info", "the only checkpoint is that of the last step"),
    "T107": Code("info", "no loss is logged during the run"),
    "T108": Code("warning", "much of the training data is never used"),
    # Output folder, and the checkpoint to resume from
    "T201": Code("error", "output_dir cannot be written to"),
    "T202": Code("error", "the disk is too small for the checkpoints"),
    "T205": Code("error", "the checkpoint to resume from is missing or damaged, lacks something or cannot be read"),
    "T206": Code("warning", "a damaged checkpoint would be skipped"),
    "T207": Code("warning", "the run to be resumed is complete"),
    "T208": Code("warning", "output_dir holds checkpoints of an earlier run"),
    # Installed packages, and features of the device
    "T301": Code("error", "no installed package offers a name"),
    "T302": Code("error", "a library that an option needs is missing"),
    "T303": Code("error", "the device or the launch environment does not allow what is asked for"),
    "T304": Code("error", "the optimizer or its schedule cannot be built"),
    "T306": Code("error", "the device's memory is too small"),
    # Data
    "T402": Code("error", "samples cannot be loaded, or made a batch"),
    "T404": Code("error", "something cannot be sent to loading processes"),
    "T405": Code("error", "a label is outside the model's classes"),
    "T406": Code("info", "data that can be read only once was not read"),
    "T407": Code("error", "the evaluation data is empty"),
    "T408": Code("error", "labels are not class numbers"),
    "T409": Code("warning", "the data holds a number that is not finite"),
    # Model, loss and gradients
    "T501": Code("error", "nothing of the model can be trained"),
    "T502": Code("error", "forward or backward fails"),
    "T503": Code("error", "the model gives no loss"),
    "T505": Code("error", "the loss is not one number, or has no gradient"),
    "T506": Code("error", "the first loss or gradient is not finite"),
    "T508": Code("warning", "trainable parameters get no gradient"),
    "T509": Code("error", "the loss grows with the number of samples"),
    "T510": Code("error", "a step's loss depends on how it is divided into micro-batches"),
    "T514": Code("error", "an id is outside the model's embedding"),
    # Metrics
    "T601": Code("error", "metric_for_best_model is not among the results, or not a number"),
    "T604": Code("error", "an evaluation or its compute_metrics fails"),
}

IN_MEMORY = ("parameter", "gradient", "optimizer", "snapshot")
_ORDER: tuple[Severity, ...] = ("error", "warning", "info")
# How figures are shown that are no plain numbers or words.
_SHOWN: dict[str, Callable[[Any], str]] = {
    **{f"{part}_bytes{of}": size for part in IN_MEMORY for of in ("", "_of_a_device")},
    **dict.fromkeys(("checkpoint_bytes", "disk_bytes", "disk_free_bytes"), size),
    "loss": "{:.6g}".format,
    "metrics": ", ".join,
}


@dataclass(frozen=True)
class Problem:
    """One problem or piece of information.

    Attributes:
        code: its kind, one of `tr_core.preflight.report.CODES`.
        message: problem with values, requirement, and the change to make.
        origin: where the cause is: an option with the file or command line that gave it, or the line of the script or
            library of the user that raised; empty if unknown.
    """

    code: str
    message: str
    origin: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "message", mask_secrets(self.message))

    @property
    def severity(self) -> Severity:
        """`error`, `warning` or `info`."""
        return CODES[self.code].severity


@dataclass
class Report:
    """The results of a preflight."""

    target: str
    problems: list[Problem] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.problems = sorted(self.problems, key=lambda problem: _ORDER.index(problem.severity))

    def count(self, severity: Severity) -> int:
        """Count the problems of a severity."""
        return sum(problem.severity == severity for problem in self.problems)

    def exit_code(self, *, strict: bool = False) -> int:
        """Return 1 if there is an error, or with `strict` a warning; else 0."""
        return int(bool(self.count("error") or (strict and self.count("warning"))))

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON-compatible values."""
        problems = [{**asdict(problem), "severity": problem.severity} for problem in self.problems]
        return {"target": self.target, "problems": problems, "figures": self.figures}

    def to_json(self) -> str:
        """Return the report as JSON text."""
        return json.dumps(self.to_dict(), indent=2, default=str)

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Report:
        """Return the report from the result of `to_dict`."""
        problems = [Problem(p["code"], p["message"], p["origin"]) for p in content["problems"]]
        return cls(content["target"], problems, dict(content["figures"]))

    def __str__(self) -> str:
        lines = [f"preflight of {self.target}"]
        for problem in self.problems:
            place = [f"at {problem.origin}"] if problem.origin else []
            lines.append(_entry(f"{problem.code} {problem.severity}", [*problem.message.splitlines(), *place]))
        known = {name: value for name, value in self.figures.items() if value is not None}
        lines += [_entry(name.replace("_", " "), [_shown(name, value)]) for name, value in known.items()]
        found = [f"{number} {kind}{'s' * (number > 1)}" for kind in _ORDER[:2] if (number := self.count(kind))]
        return "\n".join([*lines, ", ".join(found) or "no problems found"])


def _shown(name: str, value: Any) -> str:
    return _SHOWN[name](value) if name in _SHOWN else f"{value:,}" if type(value) is int else str(value)


def _entry(title: str, paragraphs: list[str]) -> str:
    indent = " " * 24
    texts = [textwrap.fill(text, 100, initial_indent=indent, subsequent_indent=indent) for text in paragraphs]
    return f"  {title:<22}" + "\n".join(texts).lstrip()


# Files that the user cannot change.
_FOREIGN = re.compile(r"^<|lib/python|(site|dist)-packages|[/\\]tr_(args|log|core|ckpt|optim|dist|all)[/\\]")


def last_line(error: BaseException) -> str:
    """Return the last line of the traceback, whole, and the notes: `ValueError: text`."""
    return "".join(traceback.format_exception_only(error)).strip()


def raised_at(error: BaseException) -> str:
    """Return `file:line in function` of the user's deepest frame; empty if there is none."""
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if not _FOREIGN.search(frame.filename)]
    return f"{own[-1].filename.removeprefix(os.getcwd() + os.sep)}:{own[-1].lineno} in {own[-1].name}" if own else ""


def argument_problems(error: ArgumentsError, where: str = "") -> Iterator[Problem]:
    """Yield a problem for each entry of an `ArgumentsError`, with what gave the value and where it was raised."""
    for problem in error.problems:
        of_pair = "T003" if problem.others else "T002"
        code = "T001" if problem.is_unknown else of_pair if problem.field else "T004"
        yield Problem(code, str(problem), ", ".join(filter(None, (problem.origin, where))))
