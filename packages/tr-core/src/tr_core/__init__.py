"""Train and evaluate PyTorch models with a complete loop.

Names are imported on first use: what needs no torch, such as arguments or a command's help, loads none.
"""

from typing import TYPE_CHECKING

from tr_core.start import on_first_use

if TYPE_CHECKING:
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
    from tr_core.seq2seq_trainer import Seq2SeqTrainer
    from tr_core.single_device import SingleDevice
    from tr_core.state import TrainerControl, TrainerState
    from tr_core.trainer import Trainer

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

# The module of each name; `if TYPE_CHECKING` above repeats it for editors and type checkers.
_ORIGINS = {
    "Checkpointer": "tr_core.protocols",
    "DataCollatorForLanguageModeling": "tr_core.collators",
    "DataCollatorForSeq2Seq": "tr_core.collators",
    "DataCollatorForTokenClassification": "tr_core.collators",
    "DataCollatorWithPadding": "tr_core.collators",
    "DefaultFlowCallback": "tr_core.callbacks.defaults",
    "EarlyStoppingCallback": "tr_core.callbacks.early_stopping",
    "EvalLoopOutput": "tr_core.results",
    "EvalPrediction": "tr_core.results",
    "PluginError": "tr_core.plugins",
    "PredictionOutput": "tr_core.results",
    "Seq2SeqTrainer": "tr_core.seq2seq_trainer",
    "Seq2SeqTrainingArguments": "tr_args",
    "SingleDevice": "tr_core.single_device",
    "Strategy": "tr_core.protocols",
    "TrainOutput": "tr_core.results",
    "Trainer": "tr_core.trainer",
    "TrainerCallback": "tr_core.callback",
    "TrainerControl": "tr_core.state",
    "TrainerState": "tr_core.state",
    "TrainingArguments": "tr_args",
    "default_data_collator": "tr_core.collators",
    "enable_full_determinism": "tr_core.random_state",
    "get_scheduler": "tr_core.optim.schedules",
    "set_seed": "tr_core.random_state",
}

__getattr__, __dir__ = on_first_use(__name__, _ORIGINS, ("collators", "preflight"))
