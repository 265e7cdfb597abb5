"""Tokenizers made in memory, of words and of pieces of words."""

from typing import Any

import tokenizers
import transformers

WORDS = [f"w{number}" for number in range(14)]
LETTERS = "abcdefghij"


def word_tokenizer(**settings: Any) -> Any:
    """Return a tokenizer of 14 words whose id is their place after the special tokens; `settings` go to it."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    vocabulary = {word: number for number, word in enumerate([*special, *WORDS])}
    return _wrap(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"), vocabulary, settings)


def piece_tokenizer(**settings: Any) -> Any:
    """Return a tokenizer that splits words into letters."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    pieces = [*LETTERS, *(f"##{letter}" for letter in LETTERS)]
    vocabulary = {piece: number for number, piece in enumerate([*special, *pieces])}
    return _wrap(tokenizers.models.WordPiece(vocabulary, unk_token="[UNK]"), vocabulary, settings)


def _wrap(model: Any, vocabulary: dict[str, int], settings: dict[str, Any]) -> Any:
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    ends = [("[CLS]", vocabulary["[CLS]"]), ("[SEP]", vocabulary["[SEP]"])]
    backend.post_processor = tokenizers.processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ends)
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, **{**names, "mask_token": "[MASK]", **settings}
    )
