"""Cut words into pieces, and give each word's tag to one of its pieces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tagged_greek import Verse
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

IGNORED = -100


def train_tokenizer(verses: Sequence[Verse], vocab_size: int, max_length: int) -> PreTrainedTokenizerFast:
    """Return a WordPiece tokenizer whose pieces are the most useful ones for the words of `verses`."""
    pieces = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    pieces.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])
    pieces.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    trainer = trainers.WordPieceTrainer(vocab_size=vocab_size, special_tokens=["[PAD]", "[UNK]"], show_progress=False)
    pieces.train_from_iterator((word for verse in verses for word in verse.words), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=pieces, pad_token="[PAD]", unk_token="[UNK]", model_max_length=max_length
    )


def encode(verses: Sequence[Verse], tokenizer: Any, tags: Sequence[str]) -> list[dict[str, list[int]]]:
    """Return what a model takes, one mapping a verse: token numbers, and a label for each of them.

    The last piece of a word bears the word's label, for in Greek the ending tells most; the others bear -100, which
    no loss and no metric counts.

    Args:
        verses: words with tags.
        tokenizer: a fast tokenizer of transformers.
        tags: the tags in the order of the model's outputs.
    """
    number = {tag: place for place, tag in enumerate(tags)}
    encoded = tokenizer([verse.words for verse in verses], is_split_into_words=True, truncation=True)
    rows = []
    for row, verse in enumerate(verses):
        words = encoded.word_ids(row)
        labels = [
            IGNORED if word == following else number[verse.tags[word]]
            for word, following in zip(words, [*words[1:], None], strict=True)
        ]
        rows.append({**{key: encoded[key][row] for key in ("input_ids", "attention_mask")}, "labels": labels})
    return rows
