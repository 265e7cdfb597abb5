"""Serve images as samples, each time a little rotated, scaled and shifted if wanted."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional as F
from torch.utils.data import Dataset


@dataclass(frozen=True)
class Augmentation:
    """How much images may be changed; each is changed by an amount drawn evenly from 0 to this, in both directions.

    Attributes:
        degrees: rotation.
        scale: share of the size, both directions by the same.
        shift: share of the width and of the height.
    """

    degrees: float = 10.0
    scale: float = 0.1
    shift: float = 0.08

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        """Return changed copies of `images`, shape `(n, 1, height, width)`.

        It draws from torch's global generator. The Trainer seeds that for each batch from the run's seed, the pass and
        the place in the data, so that a resumed run, or one with other workers, sees the same images.
        """
        angle, scale, right, down = (2 * torch.rand(4, len(images)) - 1).unbind()
        angle, scale = angle * math.radians(self.degrees), 1 + self.scale * scale
        right, down = 2 * self.shift * right, 2 * self.shift * down  # an image is 2 wide in what follows
        cos, sin = scale * torch.cos(angle), scale * torch.sin(angle)
        theta = torch.stack([torch.stack([cos, -sin, right], -1), torch.stack([sin, cos, down], -1)], 1)
        grid = F.affine_grid(theta, list(images.shape), align_corners=False)
        return F.grid_sample(images, grid, align_corners=False)


class Digits(Dataset[dict[str, torch.Tensor]]):
    """Images and labels as samples that a model takes: `pixel_values` from 0 to 1, shape `(1, 28, 28)`, and `labels`.

    Args:
        images: uint8, shape `(n, 28, 28)`.
        labels: int64, shape `(n,)`.
        augmentation: what is done to images; None leaves them as they are.
    """

    def __init__(self, images: np.ndarray, labels: np.ndarray, augmentation: Augmentation | None = None) -> None:
        self.images = torch.from_numpy(images).unsqueeze(1).float() / 255
        self.labels = torch.from_numpy(labels)
        self.augmentation = augmentation

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """Return one sample."""
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> list[dict[str, torch.Tensor]]:
        """Return the samples of a batch: torch's and the Trainer's loaders ask for them together."""
        images = self.images[indices]
        if self.augmentation is not None:
            images = self.augmentation(images)
        labels = self.labels[indices]
        return [{"pixel_values": image, "labels": label} for image, label in zip(images, labels, strict=True)]
