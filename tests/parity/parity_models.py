"""Models of the scenarios: plain modules, and tiny ones of transformers built from a configuration."""

from typing import Any

import torch
import transformers
from torch import nn
from torch.nn import functional as F


class Linear(nn.Module):
    """One linear layer with the mean squared error."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        prediction = self.layer(x)
        if labels is None:
            return {"logits": prediction}
        return {"loss": F.mse_loss(prediction, labels), "logits": prediction}


class Mlp(nn.Module):
    """Two layers with a norm between them, for classes.

    Args:
        dropout: probability of it.
    """

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(5, 16), nn.LayerNorm(16), nn.Linear(16, 3)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        logits = self.last(self.dropout(F.gelu(self.norm(self.first(x)))))
        return {"logits": logits} if labels is None else {"loss": F.cross_entropy(logits, labels), "logits": logits}


class TupleMlp(Mlp):
    """The same, returning a tuple."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        return tuple(super().forward(x, labels).values())


def dropping_mlp() -> Mlp:
    """Return a model that draws random numbers in training."""
    return Mlp(dropout=0.3)


def llama() -> nn.Module:
    """Return a causal language model of two layers without dropout."""
    config = transformers.LlamaConfig(
        vocab_size=17,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=16,
        pad_token_id=0,
    )
    return transformers.LlamaForCausalLM(config)


def gpt2_without_loss_type() -> nn.Module:
    """Return a causal language model with tied embeddings, without dropout."""
    config = transformers.GPT2Config(
        vocab_size=17, n_positions=16, n_embd=16, n_layer=1, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
    )
    return transformers.GPT2LMHeadModel(config)


def gpt2() -> nn.Module:
    """Return that model with its kind of loss named, so that the reference counts its targets rightly as well."""
    model = gpt2_without_loss_type()
    model.loss_type = "ForCausalLM"
    return model


def bert_classifier(dropout: float = 0.0, **settings: Any) -> nn.Module:
    """Return a sequence classifier of one layer; `settings` go to its configuration."""
    config = transformers.BertConfig(
        vocab_size=17,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=16,
        num_labels=2,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        **settings,
    )
    return transformers.BertForSequenceClassification(config)


def bert_with_hidden_states() -> nn.Module:
    """Return the same with more outputs: a tuple of hidden states."""
    return bert_classifier(output_hidden_states=True)


def t5() -> nn.Module:
    """Return an encoder and decoder of one layer each, without dropout."""
    config = transformers.T5Config(
        vocab_size=17,
        d_model=16,
        d_kv=8,
        d_ff=24,
        num_layers=1,
        num_heads=2,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    return transformers.T5ForConditionalGeneration(config)


def bert_tagger() -> nn.Module:
    """Return a token classifier of one layer, without dropout."""
    config = transformers.BertConfig(
        vocab_size=17,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=16,
        num_labels=17,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return transformers.BertForTokenClassification(config)
