"""Make batches of samples: one way a file."""

from tr_core.collators.default import default_data_collator
from tr_core.collators.flattening import DataCollatorWithFlattening
from tr_core.collators.language_modeling import DataCollatorForLanguageModeling
from tr_core.collators.padding import DataCollatorWithPadding
from tr_core.collators.seq2seq import DataCollatorForSeq2Seq
from tr_core.collators.token_classification import DataCollatorForTokenClassification

__all__ = [
    "DataCollatorForLanguageModeling",
    "DataCollatorForSeq2Seq",
    "DataCollatorForTokenClassification",
    "DataCollatorWithFlattening",
    "DataCollatorWithPadding",
    "default_data_collator",
]
