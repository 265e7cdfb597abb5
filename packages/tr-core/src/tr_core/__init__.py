"""Train and evaluate PyTorch models with a complete loop."""

from tr_args import Seq2SeqTrainingArguments, TrainingArguments
from tr_core.callback import TrainerCallback
from tr_core.callbacks.defaults import DefaultFlowCallback
from tr_core.callbacks.early_stopping import EarlyStoppingCallback
from tr_core.collators import (
    DataCollatorForLanguageModeling,
    DataCollatorForSeq2Seq,
    DataCollatorForTokenClassification,
    DataCollatorWithPadding,
    default_data_collator,
)
from tr_core.optim.schedules import get_scheduler
from tr_core.plugins import PluginError
from tr_core.protocols import Checkpointer, Strategy
from tr_core.random_state import enable_full_determinism, set_seed
from tr_core.results import EvalLoopOutput, EvalPrediction, PredictionOutput, TrainOutput
from tr_core.single_device import SingleDevice
from tr_core.state import TrainerControl, TrainerState
from tr_core.trainer.seq2seq import Seq2SeqTrainer
from tr_core.trainer.trainer import Trainer

__all__ = [
    "Checkpointer",
    "DataCollatorForLanguageModeling",
    "DataCollatorForSeq2Seq",
    "DataCollatorForTokenClassification",
    "DataCollatorWithPadding",
    "DefaultFlowCallback",
    "EarlyStoppingCallback",
    "EvalLoopOutput",
    "EvalPrediction",
    "PluginError",
    "PredictionOutput",
    "Seq2SeqTrainer",
    "Seq2SeqTrainingArguments",
    "SingleDevice",
    "Strategy",
    "TrainOutput",
    "Trainer",
    "TrainerCallback",
    "TrainerControl",
    "TrainerState",
    "TrainingArguments",
    "default_data_collator",
    "enable_full_determinism",
    "get_scheduler",
    "set_seed",
]
