"""A Llama with random weights, of the sizes that papers name, without a library of models."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True)
class Config:
    """Sizes, by the names that Llama's configuration has for them."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    rope_theta: float = 10_000.0


CONFIGS = {
    "7b": Config(32_000, 4096, 11_008, 32, 32),
    "1b": Config(32_000, 2048, 5461, 24, 32),
    "tiny": Config(256, 64, 172, 2, 4),
}
# Tokens whose logits are there at a time: those of all would take more than a layer's activations.
_LOSS_TOKENS = 512


class Layer(nn.Module):
    """Attention with rotary positions and a gated layer, each after a norm and added to what came in."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        width, inner = config.hidden_size, config.intermediate_size
        self.heads = config.num_attention_heads
        self.input_layernorm, self.post_attention_layernorm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate_proj, self.up_proj = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        normed = self.input_layernorm(x)

        def heads_of(layer: nn.Module) -> torch.Tensor:
            return layer(normed).view(batch, length, self.heads, width // self.heads).transpose(1, 2)

        query, key = (_rotated(heads_of(layer), cosine, sine) for layer in (self.q_proj, self.k_proj))
        mixed = nn.functional.scaled_dot_product_attention(query, key, heads_of(self.v_proj), is_causal=True)
        x = x + self.o_proj(mixed.transpose(1, 2).reshape(batch, length, width))
        normed = self.post_attention_layernorm(x)
        return x + self.down_proj(nn.functional.silu(self.gate_proj(normed)) * self.up_proj(normed))


class Llama(nn.Module):
    """Predict each next token.

    Args:
        config: sizes.
        checkpoints: compute each layer again in the backward pass, and the logits of a few tokens at a time.
    """

    def __init__(self, config: Config, *, checkpoints: bool) -> None:
        super().__init__()
        self.config, self.checkpoints = config, checkpoints
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of all tokens but the first of each row."""
        x = self.embed_tokens(tokens[:, :-1])
        cosine, sine = self._angles(x)
        for layer in self.layers:
            x = checkpoint(layer, x, cosine, sine, use_reentrant=False) if self.checkpoints else layer(x, cosine, sine)
        hidden, labels = self.norm(x).flatten(0, 1), tokens[:, 1:].flatten()
        if not self.checkpoints:
            return self._loss(hidden, labels) / len(labels)
        parts = zip(hidden.split(_LOSS_TOKENS), labels.split(_LOSS_TOKENS), strict=True)
        return sum(checkpoint(self._loss, *part, use_reentrant=False) for part in parts) / len(labels)

    def _loss(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.lm_head(hidden).float(), labels, reduction="sum")

    def _angles(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        size = self.config.hidden_size // self.config.num_attention_heads
        speeds = self.config.rope_theta ** (-torch.arange(0, size, 2, device=x.device).float() / size)
        angles = torch.arange(x.shape[1], device=x.device).float()[:, None] * speeds
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


def _rotated(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1)
