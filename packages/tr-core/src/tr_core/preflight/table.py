"""Show a report as text: problems first, then the figures."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from typing import Any

from tr_core.preflight.report import Report
from tr_log.wording import duration, size

WIDTH = 100


def table(report: Report) -> str:
    """Return the report as lines of at most about 100 characters."""
    lines = [f"preflight of {report.target}", ""]
    if report.problems:
        lines += ["problems", *(line for problem in report.problems for line in _problem(problem)), ""]
    rows = [(title, show(report.figures)) for title, show in _FIGURES]
    shown = [(title, text) for title, text in rows if text]
    if shown:
        width = max(len(title) for title, _ in shown)
        lines += ["figures", *(line for title, text in shown for line in _figure(title, text, width)), ""]
    return "\n".join([*lines, summary(report)])


def summary(report: Report) -> str:
    """Return one line that says how many problems there are."""
    errors, warnings = report.count("error"), report.count("warning")
    if not errors and not warnings:
        return "no problems found"
    return f"{_plural(errors, 'error')}, {_plural(warnings, 'warning')}"


def _problem(problem: Any) -> list[str]:
    lead = f"  {problem.code} {problem.severity:<7}  "
    paragraphs = problem.message.splitlines() or [""]
    lines = []
    for number, paragraph in enumerate(paragraphs):
        start = lead if number == 0 else " " * len(lead)
        indent = " " * (len(lead) + len(paragraph) - len(paragraph.lstrip()))
        lines += textwrap.wrap(paragraph.strip(), WIDTH, initial_indent=start, subsequent_indent=indent) or [""]
    known = problem.origin not in ("", "default")
    return [*lines, f"{' ' * len(lead)}at {problem.origin}"] if known else lines


def _figure(title: str, text: str, width: int) -> list[str]:
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
