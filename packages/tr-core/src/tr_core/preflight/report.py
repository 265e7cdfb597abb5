"""Report the results of a preflight: problems with stable codes, and figures."""

from __future__ import annotations

import contextlib
import json
import textwrap
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from tr_log.formatting import duration, size
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
    "T004": Code("error", "the configuration file cannot be read"),
    "T005": Code("error", "the script failed before it began to train"),
    "T006": Code("error", "the script ended without training, evaluating or predicting with a Trainer"),
    "T007": Code("error", "this version does not act on an option"),
    "T009": Code("error", "the Trainer refuses what it was given"),
    "T010": Code("info", "something cannot be known from a configuration file alone"),
    "T011": Code("error", "the script began to train with a loop of its own"),
    "T012": Code("warning", "a check could not be made"),
    # Length and events of the run
    "T101": Code("error", "the training data gives no batch"),
    "T102": Code("error", "the length of the run is unknown"),
    "T103": Code("error", "no evaluation takes place"),
    "T104": Code("warning", "the only evaluation is that of the last step"),
    "T105": Code("error", "the warmup is not shorter than the run"),
    "T106": Code("info", "the only checkpoint is that of the last step"),
    "T107": Code("info", "no loss is logged during the run"),
    "T108": Code("warning", "much of the training data is never used"),
    # Output folder, and the checkpoint to resume from
    "T201": Code("error", "output_dir cannot be written to"),
    "T202": Code("error", "the disk is too small for the checkpoints"),
    "T203": Code("info", "the number of checkpoints is not limited"),
    "T204": Code("error", "there is no checkpoint to resume from"),
    "T205": Code("error", "the checkpoint to resume from is damaged, lacks something or cannot be read"),
    "T206": Code("warning", "a damaged checkpoint would be skipped"),
    "T207": Code("warning", "the run to be resumed is complete"),
    "T208": Code("warning", "output_dir holds checkpoints of an earlier run"),
    # Installed packages, and features of the device
    "T301": Code("error", "no installed package offers a name"),
    "T302": Code("error", "a library that an option needs is missing"),
    "T303": Code("error", "the device or the launch environment does not allow what is asked for"),
    "T304": Code("error", "the optimizer cannot be built"),
    "T305": Code("error", "the schedule cannot be built"),
    "T306": Code("error", "the device's memory is too small"),
    # Data
    "T401": Code("error", "there is no training data"),
    "T402": Code("error", "a sample cannot be loaded"),
    "T403": Code("error", "samples cannot be made a batch"),
    "T404": Code("error", "something cannot be sent to loading processes"),
    "T405": Code("error", "a label is outside the model's classes"),
    "T406": Code("info", "data that can be read only once was not read"),
    "T407": Code("error", "the evaluation data is empty"),
    "T408": Code("error", "labels are not whole numbers"),
    "T409": Code("warning", "the data holds a number that is not finite"),
    "T410": Code("error", "the data set does not hold samples"),
    "T411": Code("error", "a column of text was not tokenized"),
    # Model, loss and gradients
    "T501": Code("error", "no parameter is trainable"),
    "T502": Code("error", "forward or backward fails"),
    "T503": Code("error", "the model gives no loss"),
    "T504": Code("error", "the loss is not one number"),
    "T505": Code("error", "the loss has no gradient"),
    "T506": Code("error", "the first loss is not finite"),
    "T507": Code("error", "the first gradient is not finite"),
    "T508": Code("warning", "trainable parameters get no gradient"),
    "T509": Code("error", "the loss grows with the number of samples"),
    "T510": Code("error", "a step's loss depends on how it is divided into micro-batches"),
    "T511": Code("info", "the loss would depend on the division into micro-batches, if there were several"),
    "T512": Code("info", "the self-test of the loss could not be made"),
    "T513": Code("error", "the model is quantized and has nothing that can be trained as it is"),
    "T514": Code("error", "an id is outside the model's embedding"),
    # Metrics
    "T601": Code("error", "metric_for_best_model is not among the results"),
    "T602": Code("error", "compute_metrics fails"),
    "T603": Code("error", "the metric that is watched is not a number"),
    "T604": Code("error", "evaluation fails"),
}


_ORDER: dict[Severity, int] = {"error": 0, "warning": 1, "info": 2}

WIDTH = 100
# A title, and what is shown beside it: of each part the figures that it names must be known.
_FIGURES = (
    ("model", "{model}: {parameters:,} parameters, {trainable_parameters:,} trainable, on {device} x {world_size}"),
    ("steps", "{steps:,}"),
    ("steps", "{samples_per_step:,} samples a step"),
    ("steps", "{samples:,} samples an epoch"),
    ("steps", "{epochs:,} epochs"),
    ("loss", "{loss:.6g} at the first samples"),
    ("time", "{forward_backward_s:.3g} s for forward and backward of {trial_samples} samples"),
    ("time", "at most {estimated_s:duration} for those of the run"),
    ("memory", "estimate: {parameter_bytes:size} of parameters + {gradient_bytes:size} of gradients"),
    ("memory", "{optimizer_bytes:size} of the optimizer's state, activations not included"),
    ("memory", "{optimizer_is_assumed:assumed: two float32 numbers a trainable parameter}"),
    ("memory", "measured peak of the trial {peak_bytes:size}"),
    ("disk", "{checkpoints_at_once} checkpoints at once"),
    ("disk", "{checkpoint_bytes:size} each"),
    ("disk", "{disk_bytes:size} needed"),
    ("disk", "{disk_free_bytes:size} free"),
    ("metrics", "{metrics:list}"),
)


@dataclass(frozen=True)
class Problem:
    """One problem or piece of information.

    Attributes:
        code: its kind, one of `tr_core.preflight.report.CODES`.
        message: problem with values, requirement, and the change to make.
        origin: where the cause was written: `run.yaml:12`, `command line --bf16`, `train.py:40`; empty if unknown.
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
        self.problems = sorted(self.problems, key=lambda problem: _ORDER[problem.severity])

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
        lines = [f"preflight of {self.target}", ""]
        if self.problems:
            lines += ["problems", *(line for problem in self.problems for line in _problem_lines(problem)), ""]
        if figures := _figure_lines(self.figures):
            lines += ["figures", *figures, ""]
        errors, warnings = self.count("error"), self.count("warning")
        found = f"{_plural(errors, 'error')}, {_plural(warnings, 'warning')}"
        return "\n".join([*lines, found if errors or warnings else "no problems found"])


def _problem_lines(problem: Problem) -> list[str]:
    lead = f"  {problem.code} {problem.severity:<7}  "
    lines = []
    for number, paragraph in enumerate(problem.message.splitlines() or [""]):
        start = " " * len(lead) if number else lead
        indent = " " * (len(lead) + len(paragraph) - len(paragraph.lstrip()))
        lines += textwrap.wrap(paragraph.strip(), WIDTH, initial_indent=start, subsequent_indent=indent) or [""]
    return [*lines, f"{' ' * len(lead)}at {problem.origin}"] if problem.origin else lines


def _figure_lines(figures: Mapping[str, Any]) -> list[str]:
    shown: dict[str, list[str]] = {}
    known = {name: _Figure(value) for name, value in figures.items() if value is not None and value is not False}
    for title, text in _FIGURES:
        with contextlib.suppress(KeyError):  # not every figure is known
            part = text.format_map(known)
            shown.setdefault(title, []).append(part)
    lines = []
    for title, parts in shown.items():
        lead = f"  {title:<{max(map(len, shown))}}  "
        lines += textwrap.wrap(", ".join(parts), WIDTH, initial_indent=lead, subsequent_indent=" " * len(lead))
    return lines


class _Figure(NamedTuple):
    value: Any

    def __format__(self, form: str) -> str:
        ways = {"size": size, "duration": lambda s: duration(max(s, 1)), "list": ", ".join}
        return ways[form](self.value) if form in ways else form if self.value is True else format(self.value, form)


def _plural(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def read_report(path: Path) -> Report | None:
    """Return the report in a file; None if there is none."""
    return Report.from_dict(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else None
