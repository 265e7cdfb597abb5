"""Report the results of a preflight: problems with stable codes, and figures."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
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
    # Metrics
    "T601": Code("error", "metric_for_best_model is not among the results"),
    "T602": Code("error", "compute_metrics fails"),
    "T603": Code("error", "the metric that is watched is not a number"),
    "T604": Code("error", "evaluation fails"),
}


_ORDER: dict[Severity, int] = {"error": 0, "warning": 1, "info": 2}


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
        problems = [
            {"code": p.code, "severity": p.severity, "message": p.message, "origin": p.origin} for p in self.problems
        ]
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
        # imported here: many reports are passed on without being shown

        return report_text(self)


WIDTH = 100


def report_text(report: Report) -> str:
    """Return the report as lines of at most about 100 characters."""
    lines = [f"preflight of {report.target}", ""]
    if report.problems:
        lines += ["problems", *(line for problem in report.problems for line in _problem_lines(problem)), ""]
    rows = [(title, show(report.figures)) for title, show in _FIGURES]
    shown = [(title, text) for title, text in rows if text]
    if shown:
        width = max(len(title) for title, _ in shown)
        lines += ["figures", *(line for title, text in shown for line in _figure_lines(title, text, width)), ""]
    return "\n".join([*lines, summary(report)])


def summary(report: Report) -> str:
    """Return one line with the number of problems."""
    errors, warnings = report.count("error"), report.count("warning")
    if not errors and not warnings:
        return "no problems found"
    return f"{_plural(errors, 'error')}, {_plural(warnings, 'warning')}"


def _problem_lines(problem: Any) -> list[str]:
    lead = f"  {problem.code} {problem.severity:<7}  "
    paragraphs = problem.message.splitlines() or [""]
    lines = []
    for number, paragraph in enumerate(paragraphs):
        start = lead if number == 0 else " " * len(lead)
        indent = " " * (len(lead) + len(paragraph) - len(paragraph.lstrip()))
        lines += textwrap.wrap(paragraph.strip(), WIDTH, initial_indent=start, subsequent_indent=indent) or [""]
    known = problem.origin not in ("", "default")
    return [*lines, f"{' ' * len(lead)}at {problem.origin}"] if known else lines


def _figure_lines(title: str, text: str, width: int) -> list[str]:
    lead = f"  {title:<{width}}  "
    return textwrap.wrap(text, WIDTH, initial_indent=lead, subsequent_indent=" " * len(lead))


def _plural(number: int, noun: str, several: str = "") -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {several or noun + 's'}"


def _model(figures: dict[str, Any]) -> str:
    if "parameters" not in figures:
        return ""
    counts = f"{figures['parameters']:,} parameters, {figures['trainable_parameters']:,} trainable"
    return f"{figures['model']}: {counts}, on {figures['device']} x {figures['world_size']}"


def _steps(figures: dict[str, Any]) -> str:
    if "steps" not in figures:
        return ""
    text = f"{figures['steps']:,}"
    if "samples_per_step" in figures:
        text += f" of {figures['samples_per_step']:,} samples"
    if figures.get("samples") is not None:
        text += f", {figures['samples']:,} samples an epoch"
    if figures.get("epochs") is not None:
        text += f", {_plural(figures['epochs'], 'epoch')}"
    return text


def _time(figures: dict[str, Any]) -> str:
    if "forward_backward_s" not in figures:
        return ""
    measured = f"{figures['forward_backward_s']:.3g} s for forward and backward of {figures['trial_samples']} samples"
    if "estimated_s" not in figures:
        return measured
    whole_s = figures["estimated_s"]
    whole = f"at most {duration(whole_s)}" if whole_s >= 1 else "less than a second"
    return f"estimate: {whole} of forward and backward, from {measured}"


def _memory(figures: dict[str, Any]) -> str:
    if "optimizer_bytes" not in figures:
        return ""
    parts = [("parameters", "parameter_bytes"), ("gradients", "gradient_bytes"), ("optimizer", "optimizer_bytes")]
    total = sum(figures[name] for _, name in parts)
    text = f"{size(total)} = " + " + ".join(f"{title} {size(figures[name])}" for title, name in parts)
    if figures.get("optimizer_is_assumed"):
        text += " (assumed: two float32 numbers a trainable parameter)"
    text = f"estimate: {text}; activations not included"
    if "peak_bytes" in figures:
        text += f"; measured peak of the trial {size(figures['peak_bytes'])}"
    return text


def _disk(figures: dict[str, Any]) -> str:
    if "checkpoints_at_once" not in figures:
        return ""
    number = figures["checkpoints_at_once"]
    count = "an unknown number of checkpoints" if number is None else f"{_plural(number, 'checkpoint')} at once"
    if "checkpoint_bytes" not in figures:
        return f"{count}, of a size that only the model tells"
    text = f"{count}, {size(figures['checkpoint_bytes'])} each"
    if figures.get("disk_bytes") is not None:
        text += f": {size(figures['disk_bytes'])} needed"
    if figures.get("disk_free_bytes") is not None:
        text += f", {size(figures['disk_free_bytes'])} free"
    return text


def _loss(figures: dict[str, Any]) -> str:
    return f"{figures['loss']:.6g} at the first two samples" if "loss" in figures else ""


def _metrics(figures: dict[str, Any]) -> str:
    return ", ".join(figures.get("metrics") or ())


def _workers(figures: dict[str, Any]) -> str:
    if "worker_bytes" not in figures:
        return ""
    processes = _plural(figures["workers"], "loading process", "loading processes")
    return f"{size(figures['worker_bytes'])} sent to each of {processes}"


_FIGURES: list[tuple[str, Callable[[dict[str, Any]], str]]] = [
    ("model", _model),
    ("steps", _steps),
    ("loss", _loss),
    ("time", _time),
    ("memory", _memory),
    ("disk", _disk),
    ("workers", _workers),
    ("metrics", _metrics),
]


def read_report(path: Path) -> Report | None:
    """Return the report in a file; None if there is none."""
    if not path.exists():
        return None
    return Report.from_dict(json.loads(path.read_text(encoding="utf-8")))
