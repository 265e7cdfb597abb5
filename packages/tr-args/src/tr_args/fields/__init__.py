"""Declare the training arguments, one topic a file; the text under a field is its help.

`AllFields` joins the topics, for code that reads several of them.
"""

from __future__ import annotations

from dataclasses import dataclass

from tr_args.fields.evaluation import EvaluationFields, LoggingFields
from tr_args.fields.hardware import DistributedFields, HardwareFields, PrecisionFields
from tr_args.fields.saving import HubFields, SavingFields
from tr_args.fields.training import DataFields, OptimizerFields, OutputFields, RegularizationFields, ScriptFields


# A dataclass takes its bases' fields from the last base to the first: the last one here comes first.
@dataclass(init=False, repr=False, eq=False)
class AllFields(
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
):
    """The fields of all topics, without the methods of `TrainingArguments`."""
