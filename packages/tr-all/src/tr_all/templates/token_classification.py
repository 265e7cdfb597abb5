"""Classify each word of a sentence: is it a person, a place or neither.

Run it with `python train.py --config train.yaml`. What to replace is marked YOURS.
"""

from __future__ import annotations

import random
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from tr_all import ArgumentParser, EvalPrediction, Trainer, TrainingArguments, set_seed

TAGS = ["O", "PERSON", "PLACE"]
NAMES = ["paris", "florence", "sydney", "austin", "chelsea", "jordan", "milan", "vienna"]  # each is both
PATTERNS = ["PERSON flew from PLACE to PLACE", "in PLACE PERSON met PERSON", "the mayor of PLACE greeted PERSON"]


def read(number: int, seed: int) -> list[dict[str, Any]]:
    """YOURS: sentences as `words`, with the number of the tag of each. These are made up."""
    draw = random.Random(seed)
    patterns = [draw.choice(PATTERNS).split() for _ in range(number)]
    return [
        {
            "words": [draw.choice(NAMES) if word in TAGS else word for word in pattern],
            "tags": [TAGS.index(word) if word in TAGS else 0 for word in pattern],
        }
        for pattern in patterns
    ]


class Tagger(torch.nn.Module):
    """YOURS: any module that returns `loss` and `logits`, as those of transformers do."""

    def __init__(self, words: int, tags: int, width: int = 32) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(words, width, padding_idx=0)
        self.reader = torch.nn.GRU(width, width, batch_first=True, bidirectional=True)
        self.head = torch.nn.Linear(2 * width, tags)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, Any]:
        """Return logits of shape (batch, words, tags), and the loss if there are labels; -100 is none."""
        logits = self.head(self.reader(self.embedding(input_ids))[0])
        loss = None if labels is None else torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels)
        return {"loss": loss, "logits": logits}


def compute_metrics(prediction: EvalPrediction) -> dict[str, float]:
    """Return the share of words whose tag is right, and F1 of persons and places together."""
    is_word = prediction.label_ids != -100  # padding has no tag
    found, right = prediction.predictions.argmax(-1)[is_word], prediction.label_ids[is_word]
    hits = ((found == right) & (right > 0)).sum()
    return {
        "accuracy": float((found == right).mean()),
        "f1": float(2 * hits / max(1, (found > 0).sum() + (right > 0).sum())),
    }


def main() -> None:
    """Train, evaluate, and save the model."""
    (args,) = ArgumentParser(TrainingArguments).parse_args_into_dataclasses()
    train, test = read(1000, seed=1), read(200, seed=2)
    words = sorted({word for sample in train for word in sample["words"]})
    numbers = {word: number for number, word in enumerate(words, 2)}  # 0 is padding, 1 a word that is not known

    def collate(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        rows = [torch.tensor([numbers.get(word, 1) for word in sample["words"]]) for sample in samples]
        tags = [torch.tensor(sample["tags"]) for sample in samples]
        return {
            "input_ids": pad_sequence(rows, batch_first=True),
            "labels": pad_sequence(tags, batch_first=True, padding_value=-100),
        }

    set_seed(args.seed)  # the weights are drawn from it
    trainer = Trainer(
        Tagger(len(numbers) + 2, len(TAGS)),
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
