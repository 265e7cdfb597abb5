"""Write a model card: what was trained, on which data, how, and with which results.

Results come from the log of the run: its evaluations, and the metrics of the final model.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from importlib.metadata import PackageNotFoundError, version
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tr_args import TrainingArguments
from tr_core.model_io import base_model
from tr_core.optim.optimizers import describe
from tr_core.state import TrainerState
from tr_log import get_logger
from tr_log.formatting import TIMINGS
from tr_log.line_file import write_whole

logger = get_logger("tr_core.trainer")

FILE_NAME = "README.md"
MARKER = "<!-- Written by Trainer.create_model_card, which replaces this file as long as this line is in it. -->"

# Generated cards: from here, from transformers' Trainer, and the template that PEFT saves.
_GENERATED = (MARKER, "model card has been generated automatically", "# Model Card for Model ID")
_TASKS = {
    "ForSequenceClassification": "text-classification",
    "ForTokenClassification": "token-classification",
    "ForQuestionAnswering": "question-answering",
    "ForMultipleChoice": "multiple-choice",
    "ForMaskedLM": "fill-mask",
    "ForCausalLM": "text-generation",
    "LMHeadModel": "text-generation",
    "ForImageClassification": "image-classification",
    "ForObjectDetection": "object-detection",
    "ForSemanticSegmentation": "image-segmentation",
    "ForAudioClassification": "audio-classification",
    "ForCTC": "automatic-speech-recognition",
}
_FILE_FORMATS = ("csv", "json", "pandas", "parquet", "text", "generator")
_LIBRARIES = ("transformers", "peft", "datasets", "tokenizers")

Words = str | Sequence[str] | None


@dataclass
class CardDetails:
    """Hold the contents of a card that a run does not know: the arguments of `Trainer.create_model_card`."""

    language: Words = None
    license: str | None = None
    tags: Words = None
    model_name: str | None = None
    finetuned_from: str | None = None
    tasks: Words = None
    dataset_tags: Words = None
    dataset: Words = None
    dataset_args: Words = None

    def updated(self, given: CardDetails) -> CardDetails:
        """Return the details, replaced by those in `given` that are set."""
        pairs = {f.name: (getattr(given, f.name), getattr(self, f.name)) for f in fields(self)}
        return CardDetails(**{name: old if new is None else new for name, (new, old) in pairs.items()})


@dataclass(frozen=True)
class TrainedRun:
    """Hold the contents of a card from a run, at the time of writing.

    Attributes:
        dataset: the evaluation data; without any, the training data.
        num_devices: number of processes.
        samples_per_step: samples of one optimizer step, of all processes.
        has_best_weights: whether the best weights were loaded at the end.
    """

    args: TrainingArguments
    state: TrainerState
    model: nn.Module
    optimizer: torch.optim.Optimizer | None
    dataset: Any
    num_devices: int
    samples_per_step: int
    has_best_weights: bool


@dataclass
class EvaluationFigures:
    """Hold the results of the evaluations at one step.

    Attributes:
        training_loss: the last one logged before; None if there was none.
        metrics: metrics by name, without `eval_`.
    """

    step: int
    epoch: float | None
    training_loss: float | None
    metrics: dict[str, Any] = field(default_factory=dict)


def write_model_card(run: TrainedRun, details: CardDetails) -> None:
    """Write the card to the output folder. A card written by hand is kept, with a warning."""
    path = Path(run.args.output_dir) / FILE_NAME
    if path.exists() and not any(mark in path.read_text(encoding="utf-8", errors="replace") for mark in _GENERATED):
        logger.warning(
            "%s was not written by create_model_card and stays as it is; to have it replaced, move it away or put this "
            "line into it: %s",
            path,
            MARKER,
        )
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, model_card(run, details).encode())


def model_card(run: TrainedRun, details: CardDetails) -> str:
    """Return the text of the card."""
    figures = of_the_model(run.state, run.has_best_weights)
    details = _with_defaults(run, details)
    parts = [
        front_matter(_metadata(run.model, details, figures)) + MARKER,
        f"# {_line(details.model_name)}",
        _introduction(details, figures),
        "## Model description\n\nNot written yet.",
        "## Intended uses and limitations\n\nNot written yet.",
        "## Training and evaluation data\n\nNot written yet.",
        "## Training procedure",
        "### Training hyperparameters\n\n" + _bullets(hyperparameters(run)),
    ]
    if rows := in_training(run.state):
        parts.append("### Training results\n\n" + _table(rows))
    parts.append("### Framework versions\n\n" + _bullets(_versions(run.model)))
    return "\n\n".join(parts) + "\n"


def hyperparameters(run: TrainedRun) -> dict[str, Any]:
    """Return the run's hyperparameters, by their names in model cards."""
    args, accumulation, total = run.args, run.args.gradient_accumulation_steps, run.samples_per_step
    is_by_steps = args.max_steps > 0
    found = {
        "learning_rate": args.learning_rate,
        "train_batch_size": args.train_batch_size,
        "eval_batch_size": args.eval_batch_size,
        "seed": args.seed,
        "num_devices": run.num_devices if run.num_devices > 1 else None,
        "gradient_accumulation_steps": accumulation if accumulation > 1 else None,
        "total_train_batch_size": total if total != args.train_batch_size else None,
        "optimizer": describe(run.optimizer) if run.optimizer is not None else args.optim,
        "weight_decay": args.weight_decay or None,
        "parameter_rules": args.parameter_rules or None,
        "max_grad_norm": args.max_grad_norm or None,
        "lr_scheduler_type": args.lr_scheduler_type,
        "lr_scheduler_warmup_steps": args.warmup_steps or None,
        "num_epochs": None if is_by_steps else args.num_train_epochs,
        "training_steps": args.max_steps if is_by_steps else None,
        "mixed_precision_training": "bf16" if args.bf16 else "fp16" if args.fp16 else None,
        "label_smoothing_factor": args.label_smoothing_factor or None,
    }
    return {name: value for name, value in found.items() if value is not None}


def _with_defaults(run: TrainedRun, details: CardDetails) -> CardDetails:
    args, model = run.args, base_model(run.model)
    name = args.hub_model_id or Path(args.output_dir).expanduser().absolute().name
    tag, part = _hub_dataset(run.dataset)
    defaults = CardDetails(
        model_name=str(name).split("/")[-1],
        finetuned_from=_origin(model),
        tasks=next((task for suffix, task in _TASKS.items() if type(model).__name__.endswith(suffix)), None),
        dataset_tags=tag,
        dataset_args=None if details.dataset_tags else part,
    )
    complete = defaults.updated(details)
    if complete.dataset is None:
        complete.dataset = complete.dataset_tags
    return complete


def _metadata(model: nn.Module, details: CardDetails, figures: EvaluationFigures | None) -> dict[str, Any]:
    metrics = _numbers(figures)
    # Adds the search tags that the model's library sets.
    tags = [*_words(details.tags), "generated_from_trainer", *_words(getattr(model, "model_tags", None))]
    return {
        "library_name": _library(model),
        "language": _words(details.language),
        "license": details.license,
        "base_model": details.finetuned_from,
        "tags": list(dict.fromkeys(tags)),
        "datasets": _words(details.dataset_tags),
        "metrics": [name for name in metrics if not name.endswith("loss")],
        "model-index": [{"name": _line(details.model_name), "results": _results(details, metrics)}] if metrics else [],
    }


def _results(details: CardDetails, metrics: dict[str, float]) -> list[dict[str, Any]]:
    """Return the figures once for each task and dataset; the Hub accepts none without both."""
    tasks = _words(details.tasks) or ["other"]
    names, parts = _words(details.dataset), _words(details.dataset_args)
    kinds = _words(details.dataset_tags) or names or ["unknown"]
    results = []
    for task in tasks:
        for place, kind in enumerate(kinds):
            dataset = {"type": kind, "name": names[place] if place < len(names) else kind}
            if place < len(parts):
                dataset["args"] = parts[place]
            shown = [{"type": n, "name": _title(n), "value": value} for n, value in metrics.items()]
            results.append({"task": {"type": task, "name": _title(task)}, "dataset": dataset, "metrics": shown})
    return results


def _introduction(details: CardDetails, figures: EvaluationFigures | None) -> str:
    origin = details.finetuned_from
    made = f"`{origin}`, fine-tuned" if origin else "A model trained from scratch"
    text = f"{made} on {', '.join(_words(details.dataset)) or 'an unknown data set'}."
    if figures is None:
        return text
    lines = _bullets({_title(name): _shown(value) for name, value in figures.metrics.items()})
    return f"{text} On the evaluation data it reaches, at step {figures.step}:\n\n{lines}"


def _table(rows: list[EvaluationFigures]) -> str:
    names = list(dict.fromkeys(name for row in rows for name in row.metrics))
    titles = ["Validation loss" if name == "loss" else _title(name) for name in names]
    head = ["Training loss", "Epoch", "Step", *titles]
    lines = [head, ["---:"] * len(head)]
    for row in rows:
        loss = "no log" if row.training_loss is None else _shown(row.training_loss)
        values = [_shown(row.metrics[name]) if name in row.metrics else "" for name in names]
        lines.append([loss, _shown(row.epoch), str(row.step), *values])
    return "\n".join(f"| {' | '.join(cell.replace('|', '&#124;') for cell in line)} |" for line in lines)


def _origin(model: Any) -> str | None:
    adapters = getattr(model, "peft_config", None)
    if isinstance(adapters, dict) and adapters:
        name = getattr(next(iter(adapters.values())), "base_model_name_or_path", None)
    else:
        name = getattr(getattr(model, "config", None), "_name_or_path", None)
    return None if not name or Path(str(name)).expanduser().exists() else str(name)


def _library(model: Any) -> str | None:
    modules = {base.__module__.split(".")[0] for base in type(base_model(model)).__mro__}
    return "peft" if "peft" in modules else "transformers" if "transformers" in modules else None


def _hub_dataset(dataset: Any) -> tuple[str | None, str | None]:
    """Return the origin of a `datasets.Dataset`: its identifier and configuration."""
    name = getattr(dataset, "builder_name", None)
    if not isinstance(name, str) or name in _FILE_FORMATS:
        return None, None
    return name, getattr(dataset, "config_name", None)


def _versions(model: Any) -> dict[str, str]:
    # Other libraries import peft if it is installed, so an import does not mean that this model uses it.
    unused = set() if getattr(model, "peft_config", None) else {"peft"}
    found = {}
    for name in ("tr-core", "torch", *(name for name in _LIBRARIES if name in sys.modules and name not in unused)):
        try:
            found[name] = version(name)
        except PackageNotFoundError:  # imported from a folder
            continue
    return found


def _numbers(figures: EvaluationFigures | None) -> dict[str, float]:
    found = {} if figures is None else figures.metrics
    numbers = {name: v for name, v in found.items() if isinstance(v, int | float) and not isinstance(v, bool)}
    return {name: value for name, value in numbers.items() if math.isfinite(value)}


def _words(given: Words) -> list[str]:
    return [] if given is None else [given] if isinstance(given, str) else [str(word) for word in given]


def _bullets(values: dict[str, Any]) -> str:
    return "\n".join(f"- {name}: {value}" for name, value in values.items())


def _shown(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, float) else str(value)


def _title(name: str) -> str:
    return _line(re.sub(r"[-_]+", " ", name)).capitalize()


def _line(text: Any) -> str:
    return " ".join(str(text).split())


def evaluations(history: Iterable[dict[str, Any]]) -> list[EvaluationFigures]:
    """Return the evaluations of a log, in order; evaluations of several datasets at one step are merged."""
    found: list[EvaluationFigures] = []
    loss = None
    for entry in history:
        loss = entry.get("loss", loss)
        metrics = {
            name.removeprefix("eval_"): value
            for name, value in entry.items()
            if name.startswith("eval_") and not name.endswith(TIMINGS) and "_mem_" not in name
        }
        if not metrics:
            continue
        if not found or found[-1].step != entry["step"]:
            found.append(EvaluationFigures(entry["step"], entry.get("epoch"), loss))
        found[-1].metrics.update(metrics)
    return found


def in_training(state: TrainerState) -> list[EvaluationFigures]:
    """Return the evaluations before the end of training."""
    return evaluations(state.log_history[: _end(state)])


def of_the_model(state: TrainerState, has_best_weights: bool) -> EvaluationFigures | None:
    """Return the figures of the run's final model, None if there are none.

    They come from an evaluation after the end of training. Without one they come from the best step, if its weights
    were loaded at the end, or else from the last evaluation.
    """
    if after := evaluations(state.log_history[_end(state) :]):
        return after[-1]
    during = in_training(state)
    if has_best_weights and state.best_global_step is not None:
        during = [figures for figures in during if figures.step == state.best_global_step]
    return during[-1] if during else None


def _end(state: TrainerState) -> int:
    """Return the index of the entry at the end of training; without one, the log's length."""
    places = [place for place, entry in enumerate(state.log_history) if "train_runtime" in entry]
    return places[-1] if places else len(state.log_history)


def front_matter(metadata: Mapping[str, Any]) -> str:
    """Return metadata as YAML between two lines of dashes, without entries that are empty or None."""
    import yaml  # not needed by a run that writes no card

    class Dumper(yaml.SafeDumper):
        """Quote all text: PyYAML leaves plain what YAML 1.2, as the Hub reads it, takes for a number (`08`, `1e5`)."""

    Dumper.add_representer(_Quoted, lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, '"'))
    text = yaml.dump(_plain(metadata), Dumper=Dumper, sort_keys=False, allow_unicode=True, width=math.inf)
    return f"---\n{text}---\n"


class _Quoted(str):
    """Text that is a value."""


def _plain(value: Any) -> Any:
    """Return a value in YAML's own types: the dumper does not know numpy's numbers and subclasses of text."""
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items() if _says_something(entry)}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(entry) for entry in value]
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, Integral):
        return int(value)
    return float(value) if isinstance(value, Real) else _Quoted(value)


def _says_something(value: Any) -> bool:
    return value is not None and (not isinstance(value, Sequence | Mapping) or len(value) > 0)
