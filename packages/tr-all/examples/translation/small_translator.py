"""Make a small translator with random weights, and a tokenizer for both of its languages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from message_pairs import Pair
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PegasusConfig, PegasusForConditionalGeneration, PreTrainedTokenizerFast

PAD, END = "<pad>", "</s>"
HEADS = 4


def train_tokenizer(texts: Sequence[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer made from `texts`; it ends each text by `</s>` and can write any text."""
    pairs = Tokenizer(models.BPE())
    pairs.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    pairs.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    pairs.train_from_iterator(texts, trainer)
    pairs.post_processor = processors.TemplateProcessing(
        single=f"$A {END}", special_tokens=[(END, pairs.token_to_id(END))]
    )
    return PreTrainedTokenizerFast(tokenizer_object=pairs, pad_token=PAD, eos_token=END)


def encode(pairs: Sequence[Pair], tokenizer: Any) -> list[dict[str, list[int]]]:
    """Return what a model takes, one mapping a pair: the tokens of the message, and those of its translation."""
    return [{**tokenizer(pair.english), "labels": tokenizer(pair.translation)["input_ids"]} for pair in pairs]


def small_translator(
    tokenizer: Any, hidden_size: int, num_layers: int, dropout: float
) -> PegasusForConditionalGeneration:
    """Return an encoder and decoder of the given size.

    Pegasus's architecture normalises before each layer, so that it bears the high learning rate which a short training
    needs. Weights begin at 1 / sqrt(width): with the usual 0.02 the first passes teach it less.
    """
    config = PegasusConfig(
        vocab_size=len(tokenizer),
        d_model=hidden_size,
        encoder_layers=num_layers,
        decoder_layers=num_layers,
        encoder_attention_heads=HEADS,
        decoder_attention_heads=HEADS,
        encoder_ffn_dim=2 * hidden_size,
        decoder_ffn_dim=2 * hidden_size,
        max_position_embeddings=256,
        dropout=dropout,
        attention_dropout=0.0,
        scale_embedding=True,
        init_std=hidden_size**-0.5,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        decoder_start_token_id=tokenizer.pad_token_id,
        forced_eos_token_id=None,
    )
    return PegasusForConditionalGeneration(config)
