"""Training arguments and command lines as typed, checked dataclasses, without torch."""

from tr_args.errors import ArgumentsError, Problem
from tr_args.parser import ArgumentParser, HfArgumentParser
from tr_args.schema import argument
from tr_args.training_arguments import Seq2SeqTrainingArguments, TrainingArguments
from tr_args.types.choices import Duration, HubStrategy, IntervalStrategy, ParallelMode, SaveStrategy
from tr_args.types.optimizer_options import parse_optim_args
from tr_args.types.sharding import AcceleratorConfig

HfArg = argument

__all__ = [
    "AcceleratorConfig",
    "ArgumentParser",
    "ArgumentsError",
    "Duration",
    "HfArg",
    "HfArgumentParser",
    "HubStrategy",
    "IntervalStrategy",
    "ParallelMode",
    "Problem",
    "SaveStrategy",
    "Seq2SeqTrainingArguments",
    "TrainingArguments",
    "argument",
    "parse_optim_args",
]
