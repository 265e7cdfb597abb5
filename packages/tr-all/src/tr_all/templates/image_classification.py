"""Classify images: is the shape in it a square, a cross or a line.

Run it with `python train.py --config train.yaml`. What to replace is marked YOURS.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import Dataset

from tr_all import ArgumentParser, EvalPrediction, Trainer, TrainingArguments, set_seed

CLASSES = ["square", "cross", "line"]


class Shapes(Dataset[dict[str, Any]]):
    """YOURS: images with labels, as from a folder. These are 16 x 16 pixels of noise with a shape somewhere.

    An image that is drawn when it is asked for may also be cropped or turned at random with torch's generator: the
    loader seeds that by the position in the run, so that a resumed run sees the same images.
    """

    def __init__(self, number: int, seed: int) -> None:
        self.number, self.seed = number, seed

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < self.number:
            raise IndexError(index)
        draw = torch.Generator().manual_seed(self.seed + index)
        label = index % len(CLASSES)
        image = torch.randn(1, 16, 16, generator=draw) / 2
        top, left = torch.randint(9, (2,), generator=draw).tolist()
        shape = image[0, top : top + 8, left : left + 8]
        if CLASSES[label] == "square":
            shape += 1
        elif CLASSES[label] == "cross":
            shape[3:5] += 1
            shape[:, 3:5] += 1
        else:
            shape += 2 * torch.eye(8)
        return {"pixel_values": image, "labels": label}


class Classifier(torch.nn.Module):
    """YOURS: any module that returns `loss` and `logits`, as those of transformers do."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            *(torch.nn.Conv2d(1, 16, 3, padding=1), torch.nn.ReLU(), torch.nn.MaxPool2d(2)),
            *(torch.nn.Conv2d(16, 32, 3, padding=1), torch.nn.ReLU(), torch.nn.AdaptiveMaxPool2d(1)),
            *(torch.nn.Flatten(), torch.nn.Linear(32, classes)),
        )

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, Any]:
        """Return logits of shape (batch, classes), and the loss if there are labels."""
        logits = self.layers(pixel_values)
        loss = None if labels is None else torch.nn.functional.cross_entropy(logits, labels)
        return {"loss": loss, "logits": logits}


def compute_metrics(prediction: EvalPrediction) -> dict[str, float]:
    """Return the share of images whose class is right."""
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def main() -> None:
    """Train, evaluate, and save the model."""
    (args,) = ArgumentParser(TrainingArguments).parse_args_into_dataclasses()
    set_seed(args.seed)  # the weights are drawn from it
    trainer = Trainer(
        Classifier(len(CLASSES)),
        args,
        train_dataset=Shapes(1500, seed=0),
        eval_dataset=Shapes(300, seed=1500),
        compute_metrics=compute_metrics,
    )
    trainer.train()  # goes on from a checkpoint with --resume_from_checkpoint true
    trainer.save_model()
    metrics = trainer.evaluate()
    trainer.log_metrics("eval", metrics)
    trainer.save_metrics("eval", metrics)


if __name__ == "__main__":
    main()
