"""Training arguments and command lines as typed, checked dataclasses, without torch."""

from tr_args.accelerator_config import AcceleratorConfig
from tr_args.argument_field import argument
from tr_args.duration import Duration
from tr_args.errors import ArgumentsError, Problem
from tr_args.optim_args import parse_optim_args
from tr_args.parser import ArgumentParser, HfArgumentParser
from tr_args.seq2seq_training_arguments import Seq2SeqTrainingArguments
from tr_args.strategies import HubStrategy, IntervalStrategy, ParallelMode, SaveStrategy
from tr_args.training_arguments import TrainingArguments

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
