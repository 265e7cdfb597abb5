"""The whole training stack: Trainer, arguments, logging, checkpoints, optimizers and distribution.

Names are imported from their packages on first use: `import tr_all` itself loads neither torch nor any of
them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tr_args import (
        ArgumentParser,
        HfArgumentParser,
        IntervalStrategy,
        Seq2SeqTrainingArguments,
        TrainingArguments,
    )
    from tr_ckpt import Checkpointer
    from tr_core import (
        DataCollatorForLanguageModeling,
        DataCollatorForSeq2Seq,
        DataCollatorForTokenClassification,
        DataCollatorWithPadding,
        DefaultFlowCallback,
        EarlyStoppingCallback,
        EvalPrediction,
        Seq2SeqTrainer,
        Trainer,
        TrainerCallback,
        TrainerControl,
        TrainerState,
        default_data_collator,
        get_scheduler,
        set_seed,
    )
    from tr_dist import DDP
    from tr_log import PrinterCallback, ProgressCallback
    from tr_optim import Adafactor

# The package of each name; `if TYPE_CHECKING` above repeats it for editors and type checkers.
_ORIGINS = {
    "Adafactor": "tr_optim",
    "ArgumentParser": "tr_args",
    "Checkpointer": "tr_ckpt",
    "DDP": "tr_dist",
    "DataCollatorForLanguageModeling": "tr_core",
    "DataCollatorForSeq2Seq": "tr_core",
    "DataCollatorForTokenClassification": "tr_core",
    "DataCollatorWithPadding": "tr_core",
    "DefaultFlowCallback": "tr_core",
    "EarlyStoppingCallback": "tr_core",
    "EvalPrediction": "tr_core",
    "HfArgumentParser": "tr_args",
    "IntervalStrategy": "tr_args",
    "PrinterCallback": "tr_log",
    "ProgressCallback": "tr_log",
    "Seq2SeqTrainer": "tr_core",
    "Seq2SeqTrainingArguments": "tr_args",
    "Trainer": "tr_core",
    "TrainerCallback": "tr_core",
    "TrainerControl": "tr_core",
    "TrainerState": "tr_core",
    "TrainingArguments": "tr_args",
    "default_data_collator": "tr_core",
    "get_scheduler": "tr_core",
    "set_seed": "tr_core",
}

__all__ = [
    "Adafactor",
    "ArgumentParser",
    "Checkpointer",
    "DDP",
    "DataCollatorForLanguageModeling",
    "DataCollatorForSeq2Seq",
    "DataCollatorForTokenClassification",
    "DataCollatorWithPadding",
    "DefaultFlowCallback",
    "EarlyStoppingCallback",
    "EvalPrediction",
    "HfArgumentParser",
    "IntervalStrategy",
    "PrinterCallback",
    "ProgressCallback",
    "Seq2SeqTrainer",
    "Seq2SeqTrainingArguments",
    "Trainer",
    "TrainerCallback",
    "TrainerControl",
    "TrainerState",
    "TrainingArguments",
    "default_data_collator",
    "get_scheduler",
    "set_seed",
]


def __getattr__(name: str) -> Any:
    origin = _ORIGINS.get(name)
    if origin is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    from tr_core.start import without_collection

    with without_collection():
        value = getattr(import_module(origin), name)
    globals()[name] = value  # the next access does not call this function
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
