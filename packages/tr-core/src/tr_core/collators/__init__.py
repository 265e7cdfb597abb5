"""Make batches of samples: pad them, join them, and make the labels of language models."""

from tr_core.collators.language_modeling import DataCollatorForLanguageModeling, DataCollatorWithFlattening
from tr_core.collators.padding import (
    DataCollatorForSeq2Seq,
    DataCollatorForTokenClassification,
    DataCollatorWithPadding,
    default_data_collator,
)

__all__ = [
    "DataCollatorForLanguageModeling",
    "DataCollatorForSeq2Seq",
    "DataCollatorForTokenClassification",
    "DataCollatorWithFlattening",
    "DataCollatorWithPadding",
    "default_data_collator",
]
