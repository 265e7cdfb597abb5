"""Turn texts into blocks of tokens of one length, and measure a loss over them by the text's characters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any


def token_blocks(texts: Sequence[str], tokenizer: Any, length: int) -> list[dict[str, list[int]]]:
    """Return samples of `length` tokens of the texts in a row, each text ended by the tokenizer's end token.

    What is left over at the end, less than a block, is left out.

    Args:
        texts: they, in the order in which they are put together.
        tokenizer: a tokenizer of transformers with an `eos_token_id`.
        length: tokens of a block.
    """
    rows = tokenizer(list(texts), add_special_tokens=False)["input_ids"]
    tokens = [token for row in rows for token in (*row, tokenizer.eos_token_id)]
    return [{"input_ids": tokens[start : start + length]} for start in range(0, len(tokens) - length + 1, length)]


def spread(blocks: Sequence[Any], limit: int | None) -> list[Any]:
    """Return `limit` of the blocks at even distances, or all of them."""
    count = len(blocks) if limit is None else min(limit, len(blocks))
    return [blocks[place * len(blocks) // count] for place in range(count)]


def bits_per_character(loss: float, blocks: Sequence[dict[str, list[int]]], tokenizer: Any) -> float:
    """Return a mean loss of a token as bits for a character of the text, by which different tokenizers compare.

    Args:
        loss: mean loss of a token, in nats, over all tokens of `blocks` but the first of each.
        blocks: what it was measured on.
        tokenizer: what made them.
    """
    tokens = [block["input_ids"][1:] for block in blocks]
    characters = sum(map(len, tokenizer.batch_decode(tokens, skip_special_tokens=True)))
    return loss / math.log(2) * sum(map(len, tokens)) / characters
