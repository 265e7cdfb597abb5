"""Anything else: your own data, model, loss and arguments; here a network that learns a curve.

Run it with `python train.py --config train.yaml`. What to replace is marked YOURS.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from tr_all import ArgumentParser, EvalPrediction, Trainer, TrainingArguments, set_seed


@dataclass
class OwnArguments:
    """YOURS: arguments of the script, which --help, train.yaml and the command line have too."""

    width: int = 64
    """Width of the model."""

    samples: int = 2000
    """How many samples to train on."""


def read(number: int, seed: int) -> list[dict[str, torch.Tensor]]:
    """YOURS: a mapping for each sample, in a list or a Dataset; its names are the parameters of `forward`."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.rand(number, 2, generator=draw) * 4 - 2
    y = torch.sin(2 * x[:, 0]) * x[:, 1] + 0.05 * torch.randn(number, generator=draw)
    return [{"x": each, "labels": value} for each, value in zip(x, y, strict=True)]


class Curve(torch.nn.Module):
    """YOURS: any module; what it returns is what `compute_loss` and `compute_metrics` work with."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(2, width), torch.nn.GELU(), torch.nn.Linear(width, width), torch.nn.GELU()
        )
        self.head = torch.nn.Linear(width, 1)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the prediction, of shape (batch,)."""
        return {"y": self.head(self.layers(x))[:, 0]}


class OwnTrainer(Trainer):
    """YOURS: override what should be otherwise; here the loss."""

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Return the mean loss of a batch, with the outputs of the model if they are asked for."""
        outputs = model(inputs["x"])
        loss = torch.nn.functional.smooth_l1_loss(outputs["y"], inputs["labels"])
        return (loss, outputs) if return_outputs else loss


def compute_metrics(prediction: EvalPrediction) -> dict[str, float]:
    """Return the share of the variance that the model explains: 1 is all, 0 none."""
    error = prediction.label_ids - prediction.predictions
    return {"r2": 1 - float(error.var() / prediction.label_ids.var())}


def main() -> None:
    """Train, evaluate, and save the model."""
    own, args = ArgumentParser((OwnArguments, TrainingArguments)).parse_args_into_dataclasses()
    set_seed(args.seed)  # the weights are drawn from it
    trainer = OwnTrainer(
        Curve(own.width),
        args,
        train_dataset=read(own.samples, seed=1),
        eval_dataset=read(500, seed=2),
        compute_metrics=compute_metrics,
    )
    trainer.train()  # goes on from a checkpoint with --resume_from_checkpoint true
    trainer.save_model()
    metrics = trainer.evaluate()
    trainer.log_metrics("eval", metrics)
    trainer.save_metrics("eval", metrics)


if __name__ == "__main__":
    main()
