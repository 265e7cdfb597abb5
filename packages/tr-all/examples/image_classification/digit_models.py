"""Build small image classifiers: a convolutional network written here, and a vision transformer of transformers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

CLASSES = 10


class ConvolutionalNetwork(nn.Module):
    """Two convolutions and two linear layers, 114,000 parameters.

    A model for the Trainer is any module whose forward takes a sample's keys, `labels` among them, and returns a loss
    when it got labels.
    """

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 16, 5, padding=2), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 5, padding=2), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
        )  # fmt: skip
        self.head = nn.Sequential(
            nn.Flatten(), nn.Linear(32 * 7 * 7, 64), nn.ReLU(), nn.Dropout(0.3), nn.Linear(64, CLASSES)
        )

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        """Return `logits`, shape `(n, 10)`, and with labels `loss`."""
        logits = self.head(self.features(pixel_values))
        return {"logits": logits} if labels is None else {"loss": F.cross_entropy(logits, labels), "logits": logits}


def vision_transformer() -> nn.Module:
    """Return a vision transformer for 28 x 28 pixels in patches of 4 x 4, with random weights."""
    from transformers import ViTConfig, ViTForImageClassification

    config: Any = ViTConfig(
        hidden_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=128,
        image_size=28,
        patch_size=4,
        num_channels=1,
    )
    config.num_labels = CLASSES
    return ViTForImageClassification(config)


MODELS: dict[str, Callable[[], nn.Module]] = {"cnn": ConvolutionalNetwork, "vit": vision_transformer}
