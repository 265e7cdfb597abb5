"""Look whether there is a sound checkpoint to resume from, through whatever keeps the checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from tr_core import plugins
from tr_core.preflight.report import Problem
from tr_core.preflight.subject import Subject


class _OneProcess:
    """What a checkpointer wants to know of the processes, where there is one."""

    device, rank, local_rank, world_size = torch.device("cpu"), 0, 0, 1

    def gather_objects(self, value: Any) -> list[Any]:
        return [value]


# Small parts that every checkpoint of a run has, and one of the model alone lacks.
_PARTS = ("run", "scheduler")


def check_resume(subject: Subject) -> Iterator[Problem]:
    """Read and verify the checkpoint to resume from; nothing is loaded into the run."""
    checkpointer = checkpointer_of(subject)
    if checkpointer is None or not subject.trains:
        return
    resume = subject.resume
    if resume in (None, False):
        yield from _earlier(subject, checkpointer)
        return
    automatic = resume is True or str(resume) in ("auto", "True", "true")
    source, origin = None if automatic else str(resume), subject.origin("resume_from_checkpoint")
    is_at_hub = source is not None and source.partition(":")[0] == "hub"  # which the checkpointer looks up
    if source is not None and not is_at_hub and _is_missing(Path(source)):
        message = f"resume_from_checkpoint={source!r}: there is no such folder; give a checkpoint's folder, or True"
        yield Problem("T204", message, origin)
        return
    subject.progress("verifying the checkpoint to resume from")
    try:
        step = checkpointer.restore({}, source=source, only_read=_PARTS)
    except (ValueError, OSError) as error:
        yield Problem("T205", f"resume_from_checkpoint={resume!r}: {error}", origin)
        return
    for text in checkpointer.restored.skipped:
        yield Problem("T206", text, origin)
    if step is None and str(resume) != "auto":
        yield Problem(
            "T204",
            f"resume_from_checkpoint={resume!r}, but there is no valid checkpoint in {subject.args.output_dir!r}; give "
            "the folder of one, or 'auto' to begin anew where there is none",
            origin,
        )
    elif step is not None and subject.steps is not None and step >= subject.steps:
        message = f"the checkpoint is at step {step} of {subject.steps}: there is nothing left to train; raise "
        yield Problem("T207", f"{message}num_train_epochs or max_steps to go on", origin)


def _is_missing(source: Path) -> bool:
    try:
        source.stat()
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return True
    except OSError:  # which says nothing of it: whoever reads it says what is the matter
        return False
    return False


def checkpointer_of(subject: Subject) -> Any:
    """Return what keeps the run's checkpoints; None if it keeps none or nothing of the name is installed."""
    args = subject.args
    if args.save_strategy == "no" and subject.resume in (None, False):
        return None
    if subject.given_trainer is not None:
        return subject.trainer.checkpointer()
    try:
        return plugins.load("tr.checkpointers", str(args.checkpointer))(args, _OneProcess())
    except plugins.PluginError:
        return None  # reported with the names


def _earlier(subject: Subject, checkpointer: Any) -> Iterator[Problem]:
    try:
        steps = checkpointer.steps()
    except ValueError as error:
        yield Problem("T205", str(error), subject.origin("output_dir"))
        return
    if steps:
        yield Problem(
            "T208",
            f"{subject.args.output_dir!r} holds checkpoints of an earlier run, up to step {steps[-1]}: resuming takes "
            "those until this run has saved its first, a save of the same step replaces one, and save_total_limit "
            "leaves the others; give every run an output_dir of its own, or remove them with `trainer ckpt prune`",
            subject.origin("output_dir"),
        )
