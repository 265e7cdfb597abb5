"""Train a small image classifier from scratch on handwritten digits, and test it on others.

    python image_classification.py
    python image_classification.py --model vit --num_train_epochs 30 --output_dir outputs/digits-vit

Shows: a data set that augments at random and is still resumable bit for bit, metrics of the predictions, early
stopping on them, and the best model loaded at the end. The settings are in `image_classification.args`; what is given
on the command line goes before them, and `--help` lists all that can be given.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from augmented_digits import Augmentation, Digits
from digit_images import installed_file, read_digits, split
from digit_models import MODELS

from tr_all import ArgumentParser, EarlyStoppingCallback, EvalPrediction, Trainer, TrainingArguments, set_seed

_ABOUT = "Train a small image classifier on handwritten digits; image_classification.args holds what is not given here."


@dataclass
class ExampleArguments:
    """Model and data."""

    model: Literal["cnn", "vit"] = "cnn"
    """A convolutional network, or a vision transformer, which needs transformers and more steps."""

    augment: bool = True
    """Rotate, scale and shift the training images at random."""

    patience: int = 3
    """Stop after so many passes without a better accuracy on the validation images."""


def main(argv: Sequence[str] | None = None) -> dict[str, float]:
    """Train and test; returns the test metrics.

    Args:
        argv: the arguments; None takes this program's.
    """
    parser = ArgumentParser((ExampleArguments, TrainingArguments), description=_ABOUT)
    example, args = parser.parse_args_into_dataclasses(argv, args_filename=Path(__file__).with_suffix(".args"))
    images, labels = read_digits(installed_file())
    places = split(len(labels))
    augmentation = {"train": Augmentation() if example.augment else None}
    data = {name: Digits(images[rows], labels[rows], augmentation.get(name)) for name, rows in places.items()}
    set_seed(args.seed)  # the weights are drawn from it
    trainer = Trainer(
        MODELS[example.model](),
        args,
        train_dataset=data["train"],
        eval_dataset=data["validation"],
        compute_metrics=compute_metrics,
        callbacks=[EarlyStoppingCallback(early_stopping_patience=example.patience)],
    )
    trainer.train()
    trainer.save_model()
    metrics = trainer.predict(data["test"]).metrics
    trainer.log_metrics("test", metrics)
    trainer.save_metrics("test", metrics)
    return metrics


def compute_metrics(prediction: EvalPrediction) -> dict[str, float]:
    """Return the share of the images whose digit is recognised."""
    return {"accuracy": float((prediction.predictions.argmax(axis=-1) == prediction.label_ids).mean())}


if __name__ == "__main__":
    main()
