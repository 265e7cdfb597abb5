"""Make a small GPT with random weights, and a tokenizer of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

END = "<|endoftext|>"


def train_tokenizer(texts: Sequence[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer made from `texts`; it can write any text, and needs no unknown token."""
    pairs = Tokenizer(models.BPE())
    pairs.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    pairs.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    pairs.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=pairs, bos_token=END, eos_token=END, pad_token=END)


def small_gpt(tokenizer: Any, block_length: int, hidden_size: int, num_layers: int) -> GPT2LMHeadModel:
    """Return a GPT-2 of the given size for blocks of `block_length` tokens.

    It sees less than one pass over its data, so nothing in it is dropped out.
    """
    config = GPT2Config(
        vocab_size=len(tokenizer),
        n_positions=block_length,
        n_embd=hidden_size,
        n_layer=num_layers,
        n_head=4,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"  # what it is anyhow; unset it is warned of
    return model
