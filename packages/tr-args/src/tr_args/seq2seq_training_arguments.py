"""Training arguments of models that generate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tr_args.hints import OptionalCount
from tr_args.training_arguments import TrainingArguments


@dataclass(kw_only=True, init=False, repr=False, eq=False)
class GenerationFields:
    """What evaluation generates."""

    _title = "Generation"

    predict_with_generate: bool = False
    """Generate in evaluation and prediction, for metrics on text."""

    generation_max_length: OptionalCount = None
    """Length to generate up to, in tokens. Unset is the model's generation setting."""

    generation_num_beams: OptionalCount = None
    """Beams to search with. Unset is the model's generation setting."""

    generation_config: Any = None
    """Generation settings: an object, a dict of settings, or the name or path of a model or file that has some."""


@dataclass(repr=False)
class Seq2SeqTrainingArguments(GenerationFields, TrainingArguments):
    """Training arguments of models that generate in evaluation; see `TrainingArguments`."""

    _retired = {**TrainingArguments._retired, "sortish_sampler": "set train_sampling_strategy='group_by_length'"}
