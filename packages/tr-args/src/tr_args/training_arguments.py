"""Collect all arguments of a training run in one dataclass, and add those of models that generate."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from tr_args.aliases import OldNames
from tr_args.checked import Rule
from tr_args.constraints import Later, Numbers, OptionalCount
from tr_args.fields import AllFields
from tr_args.grouped_setters import GroupedSetters
from tr_args.launcher_settings import follow_launcher
from tr_args.process import ProcessView, prepare_accelerate
from tr_args.rules import conflicts, fill_defaults, without_effect
from tr_args.serialization import Serializable
from tr_log.bounded_text import load_json


@dataclass(repr=False)
class TrainingArguments(AllFields, GroupedSetters, ProcessView, OldNames, Serializable):
    """All arguments of a training run.

    Values are converted to the fields' types when they are set (`"1e-4"` is a number) and checked. All problems are
    reported at once. Building it imports no torch, touches no device and draws no random number. If accelerate is
    imported and has no state yet, its `PartialState` is made, outside a launch of processes.

    What a subclass declares as a default, or assigns in its own `__post_init__`, is the subclass's, whatever its type.

    Raises:
        ArgumentsError: names are unknown, or values do not fit their fields or each other.
    """

    # Subclasses written for transformers add their own: text that begins with a brace is read as JSON.
    _VALID_DICT_FIELDS: ClassVar[list[str]] = [
        "accelerator_config",
        "fsdp_config",
        "deepspeed",
        "gradient_checkpointing_kwargs",
        "lr_scheduler_kwargs",
    ]

    @property
    def train_batch_size(self) -> int:
        """Samples this process takes in one forward and backward pass."""
        return self._own_share(self.per_device_train_batch_size)

    @property
    def eval_batch_size(self) -> int:
        """Samples this process takes in one forward pass of evaluation."""
        return self._own_share(self.per_device_eval_batch_size)

    def get_warmup_steps(self, num_training_steps: int) -> int:
        """Return the steps of warmup in a run of `num_training_steps`; a ratio is rounded up."""
        if self.warmup_steps >= 1:
            return int(self.warmup_steps)
        return math.ceil(num_training_steps * self.warmup_steps)

    def _own_share(self, batch_size: int) -> int:
        """Return the batch size itself, or with `split_batches` this process's part of it."""
        return batch_size // self.world_size if self.accelerator_config.split_batches else batch_size

    def _complete(self) -> None:
        for name in set(self._VALID_DICT_FIELDS) - set(TrainingArguments._VALID_DICT_FIELDS):
            value = getattr(self, name, None)
            if isinstance(value, str) and value.lstrip().startswith("{"):
                setattr(self, name, load_json(value))
        follow_launcher(self)
        fill_defaults(self, self._follow)
        if "accelerate.logging" in sys.modules:
            prepare_accelerate(use_cpu=bool(self.use_cpu))

    def _rules(self) -> Iterator[Rule]:
        return conflicts(self)

    def _rules_of_effect(self) -> Iterator[Rule]:
        return without_effect(self)

    def _derived(self) -> dict[str, Any]:
        return {"train_batch_size": self.train_batch_size, "eval_batch_size": self.eval_batch_size}


@dataclass(kw_only=True, init=False, repr=False, eq=False)
class GenerationFields:
    """What evaluation generates."""

    _title = "Generation"

    predict_with_generate: Annotated[bool, Numbers.OTHER, Later.NEXT_EVALUATION] = False
    """Generate in evaluation and prediction, for metrics on text."""

    generation_max_length: Annotated[OptionalCount, Numbers.OTHER, Later.NEXT_EVALUATION] = None
    """Length to generate up to, in tokens. Unset is the model's generation setting."""

    generation_num_beams: Annotated[OptionalCount, Numbers.OTHER, Later.NEXT_EVALUATION] = None
    """Beams to search with. Unset is the model's generation setting."""

    generation_config: Annotated[Any, Numbers.OTHER, Later.NEW_TRAINER] = None
    """Generation settings: an object, a dict of settings, or the name or path of a model or file that has some."""


@dataclass(repr=False)
class Seq2SeqTrainingArguments(GenerationFields, TrainingArguments):
    """Training arguments of models that generate in evaluation; see `TrainingArguments`."""

    _retired = {**TrainingArguments._retired, "sortish_sampler": "set train_sampling_strategy='group_by_length'"}
