"""Classify texts: is a review good or bad.

Run it with `python train.py --config train.yaml`. What to replace is marked YOURS.
"""

from __future__ import annotations

import random
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from tr_all import ArgumentParser, EvalPrediction, Trainer, TrainingArguments, set_seed

# YOURS: texts with labels, as from a file. These are made up; "not good" is bad, so the order of words counts.
OPINIONS = {0: ["bad", "dull", "not good", "not great"], 1: ["good", "great", "not bad", "not dull"]}


def read(number: int, seed: int) -> list[dict[str, Any]]:
    """Return samples with a `text` and a `label`."""
    draw = random.Random(seed)
    labels = [draw.randrange(2) for _ in range(number)]
    subjects = ["this film", "the play", "her book", "the music", "that show"]
    return [
        {"text": f"{draw.choice(subjects)} was {draw.choice(OPINIONS[label])} in the end", "label": label}
        for label in labels
    ]


class Classifier(torch.nn.Module):
    """YOURS: any module that returns `loss` and `logits`, as those of transformers do."""

    def __init__(self, words: int, classes: int, width: int = 32) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(words, width, padding_idx=0)
        self.reader = torch.nn.GRU(width, width, batch_first=True)
        self.head = torch.nn.Linear(width, classes)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, Any]:
        """Return logits of shape (batch, classes), and the loss if there are labels."""
        _, last = self.reader(self.embedding(input_ids))
        logits = self.head(last[0])
        loss = None if labels is None else torch.nn.functional.cross_entropy(logits, labels)
        return {"loss": loss, "logits": logits}


def compute_metrics(prediction: EvalPrediction) -> dict[str, float]:
    """Return the share of texts whose class is right."""
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def main() -> None:
    """Train, evaluate, and save the model."""
    (args,) = ArgumentParser(TrainingArguments).parse_args_into_dataclasses()
    train, test = read(1000, seed=1), read(200, seed=2)
    words = sorted({word for sample in train for word in sample["text"].split()})
    numbers = {word: number for number, word in enumerate(words, 2)}  # 0 is padding, 1 a word that is not known

    def collate(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        rows = [torch.tensor([numbers.get(word, 1) for word in sample["text"].split()]) for sample in samples]
        return {
            "input_ids": pad_sequence(rows, batch_first=True, padding_side="left"),
            "labels": torch.tensor([sample["label"] for sample in samples]),
        }

    set_seed(args.seed)  # the weights are drawn from it
    trainer = Trainer(
        Classifier(len(numbers) + 2, classes=2),
        args,
        data_collator=collate,
        train_dataset=train,
        eval_dataset=test,
        compute_metrics=compute_metrics,
    )
    trainer.train()  # goes on from a checkpoint with --resume_from_checkpoint true
    trainer.save_model()
    metrics = trainer.evaluate()
    trainer.log_metrics("eval", metrics)
    trainer.save_metrics("eval", metrics)


if __name__ == "__main__":
    main()
