"""LLaMA's shapes, without positions, which have no weights."""

from __future__ import annotations

import torch
from torch import nn

# vocabulary, width, inner width, layers
SIZES = {"7b": (32_000, 4096, 11_008, 32), "1b": (32_000, 2048, 5461, 24), "tiny": (300, 64, 172, 2)}


class Layer(nn.Module):
    """Attention and a gated layer, each after a norm and added to what came in."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate_proj, self.up_proj = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(inner, width, bias=False)
        self.input_layernorm, self.post_attention_layernorm = nn.RMSNorm(width), nn.RMSNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.input_layernorm(x)
        query, key, value = self.q_proj(normed), self.k_proj(normed), self.v_proj(normed)
        x = x + self.o_proj(nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True))
        normed = self.post_attention_layernorm(x)
        return x + self.down_proj(nn.functional.silu(self.gate_proj(normed)) * self.up_proj(normed))


class Llama(nn.Module):
    """Return a loss of tokens."""

    def __init__(self, vocabulary: int, width: int, inner: int, layers: int) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Layer(width, inner) for _ in range(layers))
        self.norm, self.lm_head = nn.RMSNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.lm_head(self.norm(x)).flatten(0, 1).float(), tokens.flatten())


def build(size: str, dtype: torch.dtype, device: str) -> Llama:
    """Return a model of one of `SIZES`, made in its dtype at once."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            return Llama(*SIZES[size])
    finally:
        torch.set_default_dtype(before)
