"""Everything a training run can be told, in one dataclass."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tr_args.checked import Rule
from tr_args.derivations import fill_in
from tr_args.fields.data import DataFields
from tr_args.fields.distributed import DistributedFields
from tr_args.fields.evaluation import EvaluationFields
from tr_args.fields.hardware import HardwareFields
from tr_args.fields.hub import HubFields
from tr_args.fields.logging import LoggingFields
from tr_args.fields.optimizer import OptimizerFields
from tr_args.fields.output import OutputFields
from tr_args.fields.precision import PrecisionFields
from tr_args.fields.regularization import RegularizationFields
from tr_args.fields.saving import SavingFields
from tr_args.fields.script import ScriptFields
from tr_args.grouped_setters import GroupedSetters
from tr_args.old_names import OldNames
from tr_args.process_view import ProcessView
from tr_args.rules import conflicts
from tr_args.serialization import Serializable


# A dataclass takes its bases' fields from the last base to the first: the last one here comes first.
@dataclass(repr=False)
class TrainingArguments(
    DistributedFields,
    DataFields,
    HardwareFields,
    HubFields,
    SavingFields,
    EvaluationFields,
    LoggingFields,
    PrecisionFields,
    RegularizationFields,
    OptimizerFields,
    ScriptFields,
    OutputFields,
    GroupedSetters,
    ProcessView,
    OldNames,
    Serializable,
):
    """Everything a training run can be told.

    Values are converted to the fields' types when they are set (`"1e-4"` is a number) and checked; what is
    wrong is reported all at once. Building it imports no torch, touches no device and draws no random number.

    Raises:
        ArgumentsError: names are unknown, or values do not fit their fields or each other.
    """

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
        fill_in(self)

    def _rules(self) -> Iterator[Rule]:
        return conflicts(self)

    def _derived(self) -> dict[str, Any]:
        return {"train_batch_size": self.train_batch_size, "eval_batch_size": self.eval_batch_size}
