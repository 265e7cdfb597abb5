"""Limit a run to a part of its data: `overfit_batches` and `fast_dev_run`."""

from __future__ import annotations

import copy
import math
import shutil
import tempfile
import weakref
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from tr_args import TrainingArguments
from tr_core.data.batches import Batches, batches_of
from tr_core.data.sampler import MicroBatch
from tr_core.protocols import Collectives
from tr_log import get_logger

logger = get_logger(__name__)


class FirstBatches:
    """Epochs over the first micro-batches of other data; every epoch repeats the beginning of its first epoch.

    Random numbers drawn while loading repeat in every epoch too.
    """

    def __init__(self, batches: Batches, number: int) -> None:
        self._batches, self._number = batches, number
        self.samples_per_micro_batch = batches.samples_per_micro_batch
        whole, samples = batches.num_batches, batches.num_samples
        self.num_batches = None if whole is None else min(whole, number)
        self.num_samples = None if samples is None else min(samples, number * self.samples_per_micro_batch)

    def __len__(self) -> int:
        if self.num_batches is None:
            raise TypeError("the data has no length")
        return self.num_batches

    def remaining(self, position: int) -> int | None:
        """Count the micro-batches of an epoch after `position` samples; None if unknown."""
        left = self._batches.remaining(position)
        return None if left is None else max(min(left, self._left(position)), 0)

    def iterate(self, epoch: int, position: int) -> Iterator[MicroBatch]:
        """Yield the micro-batches after `position` samples, the same in every epoch."""
        return islice(self._batches.iterate(0, position), max(self._left(position), 0))

    def samples_of(self, position: int, size: int) -> list[Any] | None:
        """Return the shares of the next micro-batches with the indices of their samples; None if they are unknown."""
        find = getattr(self._batches, "samples_of", None)
        return None if find is None else find(position, size)

    def order_state(self) -> dict[str, Any]:
        """Return the state that a checkpoint needs to repeat the order."""
        return self._batches.order_state()

    def restore_order(self, state: Mapping[str, Any], position: int) -> None:
        """Restore the order of a saved `order_state`."""
        self._batches.restore_order(state, position)

    def source_state(self) -> Any:
        """Return the data's own state of its position in the epoch on this rank."""
        return self._batches.source_state()

    def restore_source(self, places: Sequence[Any], rank: int, world_size: int, *, in_epoch: bool = True) -> None:
        """Set the next epoch to begin at a saved state of the data."""
        self._batches.restore_source(places, rank, world_size, in_epoch=in_epoch)

    def _left(self, position: int) -> int:
        # Rounded up: the short micro-batch at the end of an epoch counts as one.
        return self._number - -(-position // self.samples_per_micro_batch)


def training_batches(loader: Any, args: TrainingArguments, collectives: Collectives) -> Batches:
    """Return the epochs over a training loader, limited by `overfit_batches`; log the limit.

    Raises:
        ValueError: `overfit_batches` is a share of data without a length.
    """
    batches = limited_batches(loader, args, collectives)
    if args.overfit_batches is not None:
        number = args.overfit_batches if batches.num_batches is None else batches.num_batches
        logger.info(
            "overfit_batches=%s: every epoch is the first %s micro-batches of the training data, in the same order%s",
            args.overfit_batches,
            number,
            "" if args.eval_strategy == "no" else "; evaluations use them too",
        )
    return batches


def evaluates_training_batches(args: TrainingArguments, eval_dataset: Any) -> bool:
    """Whether an evaluation uses the training batches: with `overfit_batches`, instead of the Trainer's data.

    Data other than the Trainer's own is always used itself.
    """
    is_own = eval_dataset is None or isinstance(eval_dataset, str)
    return args.overfit_batches is not None and args.eval_strategy != "no" and is_own


def limited_batches(loader: Any, args: TrainingArguments, collectives: Collectives) -> Batches:
    """Return the epochs over a training loader, limited by `overfit_batches`."""
    batches = batches_of(loader, args.train_batch_size, collectives, trains=True, elastic=args.elastic is not None)
    return (
        batches
        if args.overfit_batches is None
        else FirstBatches(batches, _number_of_batches(args.overfit_batches, batches))
    )


def _number_of_batches(wanted: float, batches: Batches) -> int:
    if wanted >= 1:
        return int(wanted)
    if batches.num_batches is None:
        raise ValueError(
            f"overfit_batches={wanted} is a share of the training data, which has no length; give a number of "
            "micro-batches, such as overfit_batches=2"
        )
    return math.ceil(wanted * batches.num_batches)


_REPLAYED = "_replayed_folder"
_LEAVES_NOTHING = {
    "save_strategy": "no",
    "load_best_model_at_end": False,
    "enable_jit_checkpoint": False,
    "report_to": [],
    "push_to_hub": False,
}


def folder_of_replayed(args: TrainingArguments) -> str:
    """Return the `output_dir` of the run that is replayed."""
    return vars(args)[_REPLAYED]


def arguments_of_run(args: TrainingArguments, replayed: bool) -> TrainingArguments:
    """Return the arguments of a `fast_dev_run`, or of a run that is replayed; else `args` themselves.

    A replay trains as the run does, and leaves nothing: its `output_dir` is a temporary folder.
    """
    if not replayed or _REPLAYED in vars(args):
        return dev_run_arguments(args)
    changes = {"disable_tqdm": True, "profile_steps": None, "step_compile": "off"}
    trial = _in_temporary_folder(args, "replay-", changes)
    vars(trial)[_REPLAYED] = str(Path(args.output_dir).absolute())
    return trial


def _in_temporary_folder(args: TrainingArguments, prefix: str, changes: Mapping[str, Any]) -> TrainingArguments:
    trial, folder = copy.copy(args), tempfile.mkdtemp(prefix=prefix)
    kept = ("metric_for_best_model", "greater_is_better")  # callbacks may watch it
    for name, value in {**_LEAVES_NOTHING, **{name: getattr(args, name) for name in kept}, **changes}.items():
        setattr(trial, name, value)
    trial.output_dir = folder
    weakref.finalize(trial, shutil.rmtree, folder, ignore_errors=True)
    return trial


def dev_run_arguments(args: TrainingArguments) -> TrainingArguments:
    """Return the arguments of a `fast_dev_run`, or `args` themselves without it.

    They set the number of steps, a log at each, and evaluations from the first step on. They switch off checkpoints,
    resuming, trackers, the Hub and the best model at the end. `output_dir` is a temporary folder, which is deleted with
    the returned object.
    """
    steps = int(args.fast_dev_run)
    if not steps:
        return args
    changes = {
        "max_steps": steps if args.max_steps <= 0 else min(steps, args.max_steps),
        "logging_strategy": "steps",
        "logging_steps": 1,
        "eval_delay": 0,
    }
    trial = _in_temporary_folder(args, "fast_dev_run-", changes)
    logger.info(
        "fast_dev_run=%r: %d training steps, and as many batches of every evaluation and prediction; no checkpoints, "
        "trackers, Hub or best model. %s is not touched: what is saved goes to a temporary folder",
        args.fast_dev_run,
        trial.max_steps,
        args.output_dir,
    )
    return trial


def dev_run_batches(batches: Any, args: TrainingArguments) -> Any:
    """Return the batches of an evaluation or prediction: all, or the number that a `fast_dev_run` uses."""
    return islice(batches, int(args.fast_dev_run)) if args.fast_dev_run else batches
