"""Make batches of samples; each file holds one way."""

from tr_core.collators.flattening import DataCollatorWithFlattening
from tr_core.collators.language_modeling import DataCollatorForLanguageModeling
from tr_core.collators.padding import DataCollatorForTokenClassification, DataCollatorWithPadding, default_data_collator
from tr_core.collators.seq2seq import DataCollatorForSeq2Seq

__all__ = [
    "DataCollatorForLanguageModeling",
    "DataCollatorForSeq2Seq",
    "DataCollatorForTokenClassification",
    "DataCollatorWithFlattening",
    "DataCollatorWithPadding",
    "default_data_collator",
]
